// Boxes and arrows as SVG: drawn anew when something opens or closes (at most 300 boxes), moved by one transform otherwise.

const GLYPH = 6.7; // width of a letter at 12.5 px, on average, of the sans-serif faces of the style sheet

function drawGraph(picture, graph, opened, differs) {
  const inletIds = new Set();
  const insideBridges = new Map();
  for (const {box} of picture.boxes) {
    if (!opened.isOpen(box)) continue;
    const {inlets, inside} = edgesOf(box, graph);
    for (const child of inlets) inletIds.add(child.id);
    for (const [id, bridges] of inside) insideBridges.set(id, bridges);
  }
  const edges = svg('g', {'aria-hidden': 'true'});
  const labels = svg('g', {'aria-hidden': 'true'});
  const boxes = svg('g', {role: 'tree', 'aria-label': 'Modules and ops of the model'});
  for (const item of picture.boxes) {
    boxes.append(drawBox(item, graph, opened, insideBridges.get(item.box.id) || [], differs));
    if (inletIds.has(item.box.id) && item.level > 1) {
      edges.append(svg('path', {class: 'inlet', d: `M${item.x + 16} ${item.y - 12}V${item.y}`}));
    }
  }
  for (const item of picture.edges) {
    const lines = bridgeLines(item.edge.bridges);
    const look = lines.length ? ` bridge ${bridgeLook(lines[0].kind)}` : '';
    edges.append(
      svg('path', {
        class: `edge${look}`,
        d: smooth(item.points),
        'marker-end': 'url(#arrow)',
        'data-from': item.edge.from.id,
        'data-to': item.edge.to.id,
      }),
    );
    if (item.label) labels.append(drawLabel(item.label, lines));
  }
  return [boxes, edges, labels];
}

/** A line through points with rounded corners. */
function smooth(points) {
  const at = (point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`;
  if (points.length < 3) return `M${points.map(at).join('L')}`;
  let path = `M${at(points[0])}`;
  for (let i = 1; i < points.length - 1; i += 1) {
    const next = points[i + 1];
    const end = i === points.length - 2 ? next : {x: (points[i].x + next.x) / 2, y: (points[i].y + next.y) / 2};
    path += `Q${at(points[i])} ${at(end)}`;
  }
  return path;
}

function drawLabel(at, lines) {
  const width = Math.max(...lines.map((line) => line.text.length)) * 6.1 + 12;
  const height = lines.length * 15 + 5;
  return svg(
    'g',
    {class: 'edge-label', transform: `translate(${at.x - width / 2} ${at.y - height / 2})`},
    svg('rect', {width, height, rx: 4}),
    lines.map((line, index) => svg('text', {x: width / 2, y: 14 + index * 15, 'text-anchor': 'middle'}, line.text)),
  );
}

function drawBox({box, x, y, width, height, level}, graph, opened, bridges, differs) {
  const isOpen = opened.isOpen(box);
  const stages = stagesOf(box, graph);
  const marked = differs && !isOpen && differs(box);
  const name = box.label;
  const fit = Math.floor((width - 44) / GLYPH);
  const group = svg('g', {
    class: `box ${box.kind}${isOpen ? ' open' : ''}${marked ? ' differs' : ''}`,
    transform: `translate(${x} ${y})`,
    'data-id': box.id,
    role: 'treeitem',
    tabindex: '-1',
    'aria-level': level,
    'aria-selected': 'false',
    'aria-expanded': canOpen(box) ? String(isOpen) : null,
    'aria-label': spoken(box, graph, bridges, marked),
  });
  const rx = box.kind === 'op' ? 4 : 9;
  group.append(svg('rect', {class: 'frame', width, height, rx}));
  if (!isOpen && box.times > 1) group.prepend(svg('rect', {class: 'behind', x: 5, y: 5, width, height, rx: 9}));
  if (isOpen) {
    group.append(svg('text', {class: 'title', x: 12, y: 20}, short(openTitle(box), Math.floor((width - 70) / GLYPH))));
    group.append(svg('text', {class: 'sub', x: width - 20, y: 20, 'text-anchor': 'end'}, '−'));
    return group;
  }
  const bar = svg('g', {});
  const total = stages.reduce((sum, [, count]) => sum + count, 0);
  let down = 0;
  for (const [stage, count] of stages) {
    // the stages as a bar in front: how much of the box lies where
    const part = (height * count) / total;
    bar.append(svg('rect', {x: 0, y: down, width: 7, height: part, fill: colour(stage)}));
    down += part;
  }
  if (stages.length === 1) {
    group.append(svg('rect', {width, height, rx, fill: tint(stages[0][0])}));
    if (hatch(stages[0][0])) group.append(svg('rect', {width, height, fill: hatch(stages[0][0])}));
    group.append(svg('rect', {class: 'frame', width, height, rx, 'fill-opacity': 0}));
  }
  group.append(bar);
  group.append(svg('text', {class: box.kind === 'op' ? null : 'title', x: 15, y: 18}, short(name, fit)));
  group.append(svg('text', {class: 'sub', x: 15, y: 34}, short(boxNote(box, graph, bridges, marked), fit + 2)));
  group.append(signs(stages, width - 16));
  if (canOpen(box)) group.append(svg('text', {class: 'sub', x: width - 20, y: 38}, '+'));
  return group;
}

/** The signs of a box's stages: one, or first and last of several. */
function signs(stages, right) {
  const shown = stages.length <= 2 ? stages : [stages[0], stages[stages.length - 1]];
  const marks = shown.map(([stage], index) => signAt(stage, right - (shown.length - 1 - index) * 21, 15));
  return svg('g', null, marks);
}

function openTitle(box) {
  if (box.kind !== 'fold') return box.label + (box.className ? ` · ${box.className}` : '');
  const member = box.members[box.shown];
  return `${member.name || member.label} · one of ${box.times} equal blocks`;
}

function boxNote(box, graph, bridges, marked) {
  const notes = [];
  if (marked) notes.push('≠ placed otherwise');
  if (box.kind === 'op') notes.push(graph.kinds[graph.ops[box.op][1]].shape);
  else {
    if (box.className) notes.push(box.className);
    notes.push(plural(box.ops.length, 'op'));
    if (bridges.length) notes.push(plural(bridges.length, 'bridge'));
  }
  return notes.join(' · ');
}

function spoken(box, graph, bridges, marked) {
  const kind =
    box.kind === 'op'
      ? `op ${box.label}, ${box.name}`
      : `${box.label} ${box.className || ''}, ${plural(box.ops.length, 'op')}`;
  const stages = stagesOf(box, graph).map(([stage]) => (stage < 0 ? 'no stage' : `stage ${stage}`));
  const where = stages.length > 3 ? `${stages[0]} to ${stages[stages.length - 1]}` : stages.join(', ');
  const rest = bridges.length ? `, ${plural(bridges.length, 'bridge')} inside` : '';
  return short(`${kind}, ${where}${rest}${marked ? ', placed otherwise in the other plan' : ''}`, 300);
}
