// Search by name: a text field with a list of what it finds, as the combobox pattern of ARIA describes it.

const FOUND_LIMIT = 20;

function makeSearch(entries, choose, label) {
  const listId = newId('found');
  let found = [];
  let active = -1;
  const input = el('input', {
    type: 'search',
    role: 'combobox',
    'aria-expanded': 'false',
    'aria-controls': listId,
    'aria-autocomplete': 'list',
    'aria-label': label,
    placeholder: 'Search: module, op or parameter',
    autocomplete: 'off',
    spellcheck: 'false',
  });
  const list = el('ul', {id: listId, role: 'listbox', 'aria-label': 'Found', hidden: true});

  const close = () => {
    list.hidden = true;
    input.setAttribute('aria-expanded', 'false');
    input.removeAttribute('aria-activedescendant');
    active = -1;
  };

  const mark = (index) => {
    active = index;
    [...list.children].forEach((item, i) => item.setAttribute('aria-selected', String(i === index)));
    const item = list.children[index];
    if (item) {
      input.setAttribute('aria-activedescendant', item.id);
      item.scrollIntoView({block: 'nearest'});
    }
  };

  const take = (entry) => {
    close();
    input.value = short(entry.text, 200);
    choose(entry);
  };

  const update = () => {
    const wanted = input.value.trim().toLowerCase();
    if (!wanted) {
      close();
      return;
    }
    found = findEntries(entries, wanted);
    list.replaceChildren(
      ...found.map((entry, index) =>
        el(
          'li',
          {
            id: `${listId}-${index}`,
            role: 'option',
            'aria-selected': 'false',
            onpointerdown: (event) => {
              event.preventDefault();
              take(entry);
            },
          },
          shortEnd(entry.text, 90),
          ' ',
          el('span', {class: 'muted'}, entry.note),
        ),
      ),
    );
    list.hidden = found.length === 0;
    input.setAttribute('aria-expanded', String(found.length > 0));
    announce(found.length ? `${found.length} found` : 'nothing found');
    if (found.length) mark(0);
  };

  input.addEventListener('input', update);
  input.addEventListener('blur', close);
  input.addEventListener('keydown', (event) => {
    if (event.key === 'ArrowDown' && found.length && !list.hidden) mark((active + 1) % found.length);
    else if (event.key === 'ArrowUp' && found.length && !list.hidden) mark((active + found.length - 1) % found.length);
    else if (event.key === 'Enter') {
      if (list.hidden) update();
      if (found[Math.max(active, 0)] && input.value.trim()) take(found[Math.max(active, 0)]);
    } else if (event.key === 'Escape') close();
    else return;
    event.preventDefault();
  });
  return el('div', {class: 'search'}, input, list);
}

/** The entries that hold the wanted text: whole names first, then names that end with it, then the rest, shorter first. */
function findEntries(entries, wanted) {
  const rank = (text) => (text === wanted ? 0 : text.endsWith(`.${wanted}`) ? 1 : text.startsWith(wanted) ? 2 : 3);
  const hits = [];
  for (const entry of entries) {
    const at = entry.lower.indexOf(wanted);
    if (at >= 0) hits.push([rank(entry.lower), entry.lower.length, entry]);
  }
  hits.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  return hits.slice(0, FOUND_LIMIT).map((hit) => hit[2]);
}

/** Everything of a graph that has a name: modules, ops, parameters. */
function searchEntries(graph, boxes) {
  const entries = [];
  const add = (text, note, box) => {
    if (text) entries.push({text, lower: text.toLowerCase(), note, box});
  };
  for (const [name, box] of boxes.byName) add(name, box.className || 'module', box);
  const reader = new Map();
  graph.ops.forEach((op, index) => {
    add(op[0], graph.kinds[op[1]].op, boxes.boxOfOp[index]);
    for (const parameter of op[5]) if (!reader.has(parameter)) reader.set(parameter, index);
  });
  graph.parameters.forEach((parameter, index) => {
    if (reader.has(index)) add(parameter.name, 'parameter', boxes.boxOfOp[reader.get(index)]);
  });
  return entries.filter((entry) => entry.box);
}
