// Elements made by hand. Text only ever goes in as text nodes: no name from the data can become markup.

/** Make an element: el('p', {class: 'note', onclick: press}, 'some text', another element). Absent children are skipped. */
function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element the same way. */
function svg(tag, attributes, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity))
    if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

/** Make a part of a section below a heading of its own. */
function titled(title, ...children) {
  return el('div', null, el('h3', null, title), children);
}

/** A list of short texts, elements, or both together. Absent items are skipped. */
function list(attributes, items) {
  return el(
    'ul',
    attributes,
    items.filter(Boolean).map((item) => el('li', null, item)),
  );
}

/** The words for the looks of a picture. */
function legend(label, items) {
  return list({class: 'legend', 'aria-label': label}, items);
}

function button(text, press, attributes) {
  return el('button', {type: 'button', onclick: press, ...attributes}, text);
}

/** A part of a page that scrolls by itself: readers of the keyboard can reach it. */
function scrolling(label, child, kind = '') {
  return el('div', {class: `scroll${kind}`, tabindex: '0', role: 'group', 'aria-label': label}, child);
}

/** Make a table from column heads and rows of text or elements; columns named in `numbers` stand to the right. */
function table(caption, heads, rows, numbers = []) {
  const kind = (index) => (numbers.includes(index) ? 'number' : null);
  const head = heads.map((text, index) => el('th', {scope: 'col', class: kind(index)}, text));
  const cell = (content, index) =>
    index === 0 ? el('th', {scope: 'row', class: kind(index)}, content) : el('td', {class: kind(index)}, content);
  const content = el(
    'table',
    null,
    el('caption', null, caption),
    el('thead', null, el('tr', null, head)),
    el(
      'tbody',
      null,
      rows.map((row) => el('tr', null, row.map(cell))),
    ),
  );
  return scrolling(caption, content, ' tall');
}

/** A table that is made when it is first opened: the same figures as a picture, for those who do not see it. */
function tableOnDemand(label, make) {
  const details = el('details', null, el('summary', null, label));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) details.append(make());
  });
  return details;
}

/** Say something to a screen reader. */
function announce(text) {
  document.getElementById('live').textContent = text;
}

let lastId = 0;
/** A new id, for labels and patterns. */
function newId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}

/** Cut text in the middle of nowhere: at most `limit` characters, with an ellipsis. Counts whole characters, emoji too. */
function short(text, limit) {
  if (text.length <= limit) return text;
  const characters = [...text.slice(0, limit * 4)];
  return characters.length <= limit && text.length <= limit * 4 ? text : characters.slice(0, limit - 1).join('') + '…';
}

/** Cut a dotted name in front: its end tells more than its beginning. */
function shortEnd(text, limit) {
  return text.length <= limit ? text : '…' + text.slice(text.length - limit + 1);
}
