// The details of the chosen box: shapes, layout in words, arithmetic, bytes, time, source line, parameters, bridges.

const LISTED = 12; // of a long list; the rest is counted

function pairs(...entries) {
  return el(
    'dl',
    null,
    entries.filter((entry) => entry && entry[1]).map(([name, value]) => [el('dt', null, name), el('dd', null, value)]),
  );
}

function listOf(title, items, draw) {
  if (!items.length) return null;
  return el(
    'div',
    null,
    el('h4', null, title),
    list(null, items.slice(0, LISTED).map(draw)),
    items.length > LISTED && el('p', {class: 'muted'}, `and ${formatCount(items.length - LISTED)} more`),
  );
}

function stageWords(stage, plan) {
  if (stage < 0 || !plan.stages[stage]) return 'computed by every stage that needs it';
  const {name, devices} = plan.stages[stage];
  return el('span', null, badge(stage), ` ${name}, ${devices}`);
}

function jump(text, go) {
  return button(short(text, 120), go, {class: 'jump'});
}

/** What ops take: of a traced model arithmetic, time and bytes, of a cost graph its costs. */
function amounts(sums, graph) {
  if (graph.cost_unit) return [['cost', formatCost(sums.cost, graph.cost_unit)]];
  return [
    ['arithmetic', `${formatFlops(sums.forward_flops)} forward, ${formatFlops(sums.backward_flops)} backward`],
    ['time', timeWords(sums)],
    ['kept for backward', sums.saved_bytes > 0 && formatBytes(sums.saved_bytes)],
  ];
}

function figuresNote(graph) {
  return !graph.cost_unit && el('p', {class: 'muted'}, 'Figures are for one micro-batch.');
}

function timeWords(cost) {
  const forward = `${formatSeconds(cost.forward_seconds)} forward`;
  return cost.backward_seconds > 0 ? `${forward}, ${formatSeconds(cost.backward_seconds)} backward` : forward;
}

function opDetails(box, view) {
  const {graph, plan, boxes, choose} = view;
  const [name, kindIndex, stage, source, inputs, parameters, layout] = graph.ops[box.op];
  const kind = graph.kinds[kindIndex];
  const bridges = graph.bridges.filter((bridge) => bridge.from === box.op || bridge.to === box.op);
  const readers = graph.ops.flatMap((op, index) => (op[4].includes(box.op) ? [index] : []));
  return [
    el('h3', null, kind.op),
    pairs(
      ['name', name],
      ['in', inside(box, view)],
      [stage < 0 ? 'stage' : 'computed on', stageWords(stage, plan)],
      ['result', !graph.cost_unit && `${kind.shape} ${kind.dtype}, ${formatBytes(kind.output_bytes)}`],
      ['layout', layout >= 0 && graph.layouts[layout]],
      ...amounts(kind, graph),
      ['runs', kind.target && el('code', null, kind.target)],
    ),
    source >= 0 && el('div', null, el('h4', null, 'Source line'), el('pre', null, graph.sources[source])),
    listOf('Parameters', parameters, (index) => parameterLine(graph.parameters[index])),
    listOf('Bridges', bridges, (bridge) => bridgeLine(bridge)),
    listOf('Reads', inputs, (index) => jump(graph.ops[index][0], () => choose(boxes.boxOfOp[index]))),
    listOf('Read by', readers, (index) => jump(graph.ops[index][0], () => choose(boxes.boxOfOp[index]))),
    figuresNote(graph),
    explained(name, [box.op], view),
  ];
}

function parameterLine(parameter) {
  const text = [parameter.name, parameter.shape, formatBytes(parameter.size_bytes)].filter(Boolean).join(', ');
  return parameter.layout ? `${text}: ${parameter.layout}` : text;
}

function bridgeLine(bridge) {
  const amount = bridgeAmount(bridge.size_bytes, bridge.cost, bridge.unit);
  const time = bridge.seconds ? `, ${formatSeconds(bridge.seconds)}` : '';
  const text = `${bridge.kind}, ${amount}${bridge.gradient ? ' back' : ''}${time}`;
  return bridge.text ? `${text}: ${bridge.text}` : text;
}

function inside(box, view) {
  const around = holders(box).filter((one) => one.parent);
  if (!around.length) return null;
  return el(
    'span',
    null,
    around.flatMap((one, index) => [index > 0 ? ' › ' : null, jump(one.label, () => view.choose(one))]),
  );
}

function groupDetails(box, view) {
  const {graph, plan} = view;
  const sums = sumsOf(box, graph);
  const within = new Set(box.ops);
  const bridges = graph.bridges.filter((bridge) => within.has(bridge.from) && within.has(bridge.to));
  const counts = stagesOf(box, graph);
  const stageCounts = counts
    .slice(0, LISTED)
    .map(([stage, count]) =>
      el('span', null, stageWords(stage, plan), counts.length > 1 ? `: ${plural(count, 'op')}` : '', el('br')),
    );
  return [
    el('h3', null, box.label),
    canOpen(box) &&
      el(
        'div',
        {class: 'tools'},
        button(view.isOpen(box) ? 'Close' : 'Open', () => view.toggle(box)),
        box.kind === 'fold' && memberChoice(box, view),
      ),
    pairs(
      ['name', box.name && box.name !== box.label && box.name],
      ['class', box.className],
      ['in', inside(box, view)],
      ['equal blocks', box.times > 1 && `${box.times}, one after another; figures are of all of them`],
      ['ops', formatCount(box.ops.length)],
      ['computed on', el('span', null, stageCounts, counts.length > LISTED && `and ${counts.length - LISTED} more stages`)],
      [
        'parameters',
        sums.parameters.size && `${formatCount(sums.parameters.size)}, ${formatBytes(sums.parameter_bytes)}`,
      ],
      ...amounts(sums, graph),
    ),
    listOf('Bridges inside', bridgeLines(bridges), (line) => line.text),
    figuresNote(graph),
    explained(explainedName(box), box.ops, view),
  ];
}

/** Which block of a fold is shown. */
function memberChoice(box, view) {
  const select = el(
    'select',
    {'aria-label': 'block', onchange: () => view.showMember(box, Number(select.value))},
    box.members.map((member, index) =>
      el('option', {value: index, selected: index === box.shown}, short(member.name || member.label, 60)),
    ),
  );
  return el('label', null, 'block', select);
}
