// What `partitioner explain` says of a box, as far as the plan alone tells it, and the command for the rest.

const NAMED = 4; // stages and values of one line, as the command names them

function explained(name, ops, {graph, plan}) {
  const known = graph.explained;
  if (!known) return null;
  const stages = [...new Set(ops.map((op) => graph.ops[op][2]).filter((stage) => stage >= 0))].sort((a, b) => a - b);
  const sent = ops.map((op) => known.sent[op]).filter(Boolean);
  const more = stages.length > NAMED ? ` and ${stages.length - NAMED} more stages` : '';
  const runsIn = stages.slice(0, NAMED).map((stage) => known.runs_in[stage]);
  const everywhere = stages.length ? ops.filter((op) => graph.ops[op][2] < 0).length : 0;
  const attempt = stages.length && name && known.try[stages[0]];
  return el(
    'div',
    {class: 'explained'},
    el('h4', null, 'Explained'),
    pairs(
      ['runs in', stages.length && runsIn.join('; ') + more],
      ['slowest', stages.length && known.slowest],
      ['sent', sent.slice(0, NAMED).join(', ')],
      ['everywhere', everywhere && `${plural(everywhere, 'op')}: cheap, computed by every stage that reads it`],
      ['why', stages.length ? known.why : known.everywhere],
      ['try', attempt && attempt.replace('NAME', () => short(name, 200))],
    ),
    name && stages.length > 0 && known.with_model && explainCommand(name, plan, known.with_model),
  );
}

/** The name by which the command knows a box; of a fold that of the block shown. */
function explainedName(box) {
  if (box.kind === 'fold') return box.members[box.shown].name;
  return box.kind === 'part' ? '' : box.name;
}

function explainCommand(name, plan, answer) {
  const command = `partitioner explain ${shellWord(plan.file || 'plan.json')} ${shellWord(name)} --model MODEL`;
  return el(
    'div',
    null,
    el('p', null, `The model itself is needed to tell ${answer}. MODEL is what the plan was made from:`),
    el('pre', null, short(command, 1500)),
  );
}

/** A word as a shell reads it back, whatever is in it. */
function shellWord(text) {
  return /^[\w./:@%+=,][-\w./:@%+=,]*$/.test(text) ? text : `'${text.replace(/'/g, `'\\''`)}'`;
}
