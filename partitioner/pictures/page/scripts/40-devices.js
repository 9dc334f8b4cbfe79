// The cluster: nodes as boxes of devices, shared networks as bars, links as wires whose width is what they carry.

const CELL = {width: 74, height: 46, gap: 6};
const NODES_IN_A_ROW = 4;
const NODE_LIMIT = 64; // nodes drawn; a table lists the links of all

function drawDevices(plan) {
  const {nodes, links} = plan.devices;
  const names = new Set(nodes.map((node) => node.name));
  const most = Math.max(1, ...links.map((link) => link.sent_bytes || 0));
  const width = (link) => (link.sent_bytes > 0 ? 1.5 + 9 * Math.sqrt(link.sent_bytes / most) : 1);
  const shown = nodes.slice(0, NODE_LIMIT);
  const columns = Math.min(NODES_IN_A_ROW, shown.length);
  const perRow = Math.min(4, Math.max(1, ...shown.map((node) => node.devices.length)));
  const inner = (link) => link.a === link.b;
  const nodeWidth = perRow * (CELL.width + CELL.gap) + 22;
  const nodeHeight = (node) => 34 + Math.ceil(node.devices.length / perRow) * (CELL.height + CELL.gap) + 22;
  const outer = links.filter((link) => !inner(link));
  const hubs = [...new Set(outer.flatMap((link) => [link.a, link.b]).filter((name) => !names.has(name)))];
  const hubSpace = hubs.length * 26 + (outer.length ? 34 : 0);
  const rowHeight = Math.max(...shown.map(nodeHeight)) + hubSpace + 18;
  const rows = Math.ceil(shown.length / columns);
  const total = {width: columns * (nodeWidth + 24) + 24, height: rows * rowHeight + 8};
  const count = nodes.reduce((sum, node) => sum + node.devices.length, 0);
  const picture = svg('svg', {
    class: 'cluster',
    viewBox: `0 0 ${total.width} ${total.height}`,
    width: total.width,
    role: 'img',
    'aria-label': `${plural(nodes.length, 'node')} with ${plural(count, 'device')}; the table below lists the links`,
  });
  const places = new Map();
  shown.forEach((node, index) =>
    places.set(node.name, {
      x: 24 + (index % columns) * (nodeWidth + 24),
      y: Math.floor(index / columns) * rowHeight + hubSpace + 6,
      height: nodeHeight(node),
    }),
  );

  for (let row = 0; row < rows && hubs.length; row += 1) {
    hubs.forEach((hub, index) => {
      const y = row * rowHeight + index * 26 + 4;
      picture.append(
        svg('rect', {class: 'hub', x: 24, y, width: total.width - 48, height: 18, rx: 5}),
        svg('text', {x: 34, y: y + 13}, short(hub, 60) + (row ? ' (the same)' : '')),
      );
    });
  }
  const wires = new Map();
  for (const link of outer) {
    const node = places.get(link.a) || places.get(link.b);
    if (!node) continue;
    const target = places.has(link.a) ? link.b : link.a;
    const used = wires.get(node) || 0;
    wires.set(node, used + 1);
    const x = node.x + 26 + used * 34;
    const hub = hubs.indexOf(target);
    const far = places.get(target);
    const row = Math.floor((node.y - hubSpace) / rowHeight);
    const d =
      hub >= 0
        ? `M${x} ${row * rowHeight + hub * 26 + 22}V${node.y}`
        : `M${x} ${node.y}C${x} ${node.y - 34} ${far.x + 40} ${far.y - 34} ${far.x + 40} ${far.y}`;
    picture.append(drawWire(link, d, width(link)));
    const sent = link.sent_bytes ? `, ${formatBytes(link.sent_bytes)} sent` : '';
    if (used === 0)
      picture.append(
        svg('text', {class: 'muted', x: x + 10, y: node.y - 12}, `${formatBandwidth(link.bandwidth)}${sent}`),
      );
  }
  for (const node of shown) {
    const inside = links.filter((link) => inner(link) && link.a === node.name);
    picture.append(drawNode(node, places.get(node.name), nodeWidth, perRow, inside, width));
  }
  return [
    stageLegend(plan),
    scrolling('The cluster', picture),
    plan.devices.hidden_nodes > 0 &&
      el('p', {class: 'note'}, `${plural(plan.devices.hidden_nodes, 'further node')} left out.`),
    nodes.length > shown.length &&
      el('p', {class: 'note'}, `The first ${shown.length} of ${nodes.length} nodes are drawn.`),
    el(
      'p',
      {class: 'status'},
      'The bar of a device is its memory at the peak. A wire is as thick as what it carries; orange: busy more than ' +
        'half of the step.',
    ),
    tableOnDemand('Devices and links as tables', () =>
      el(
        'div',
        null,
        table(
          'Devices',
          ['rank', 'node', 'model', 'stages', 'peak memory', 'of'],
          nodes.flatMap((node) =>
            node.devices.map((device) => [
              String(device.rank),
              node.name,
              device.model,
              device.stages.join(', ') || '–',
              formatBytes(device.peak_bytes),
              formatBytes(device.memory_bytes),
            ]),
          ),
          [4, 5],
        ),
        table(
          'Links',
          ['link', 'from', 'to', 'bandwidth', 'latency', 'sent in a step', 'busy'],
          links.map((link) => [
            link.name,
            link.a,
            link.b,
            formatBandwidth(link.bandwidth),
            formatSeconds(link.latency_seconds),
            formatBytes(link.sent_bytes || 0),
            formatShare(link.busy || 0),
          ]),
          [3, 4, 5, 6],
        ),
      ),
    ),
  ];
}

function linkText(link) {
  return (
    `${link.name}: ${formatBandwidth(link.bandwidth)}, ${formatSeconds(link.latency_seconds)} latency\n` +
    `${formatBytes(link.sent_bytes || 0)} sent in a step, busy ${formatShare(link.busy || 0)} of it`
  );
}

/** A link as a wire, as thick as what it carries. */
function drawWire(link, d, thickness) {
  const look = `wire${link.busy > 0.5 ? ' busy' : ''}`;
  return withTip(svg('path', {class: look, d, 'stroke-width': thickness, fill: 'none'}), linkText(link));
}

function drawNode(node, {x, y, height}, nodeWidth, perRow, inner, width) {
  const group = svg(
    'g',
    {transform: `translate(${x} ${y})`},
    svg('rect', {class: 'node', width: nodeWidth, height, rx: 8}),
    svg('text', {class: 'name', x: 12, y: 19}, short(node.name, Math.floor(nodeWidth / 9))),
  );
  node.devices.forEach((device, index) => {
    const left = 14 + (index % perRow) * (CELL.width + CELL.gap);
    const top = 28 + Math.floor(index / perRow) * (CELL.height + CELL.gap);
    group.append(drawDevice(device, left, top));
  });
  if (inner.length) {
    const [link] = inner;
    const sent = link.sent_bytes ? ` · ${formatBytes(link.sent_bytes)}` : '';
    const place = {class: 'muted', x: nodeWidth - 12, y: 19, 'text-anchor': 'end'};
    group.append(
      drawWire(link, `M14 ${height - 14}H${nodeWidth - 14}`, width(link)),
      svg('text', place, short(`${formatBandwidth(link.bandwidth)}${sent}`, 26)),
    );
  }
  return group;
}

function drawDevice(device, x, y) {
  const share = device.memory_bytes ? Math.max(0, Math.min(1, device.peak_bytes / device.memory_bytes)) : 0;
  const first = device.stages.length ? device.stages[0] : -1;
  const frame = {width: CELL.width, height: CELL.height, rx: 5};
  const bar = {x: 7, y: CELL.height - 14, width: CELL.width - 14, height: 7, rx: 2};
  const group = svg(
    'g',
    {transform: `translate(${x} ${y})`},
    svg('rect', {class: 'device', ...frame}),
    first >= 0 && patterned('rect', frame, tint(first), hatch(first)),
    svg('text', {class: 'name', x: 7, y: 19}, String(device.rank)),
    svg('rect', {class: 'memory-back', ...bar}),
    svg('rect', {class: 'memory-fill', ...bar, width: bar.width * share}),
    device.stages.slice(0, 2).map((stage, index) => signAt(stage, CELL.width - 13 - index * 20, 15)),
  );
  const more = device.stages.length > 2 ? ` (stages ${device.stages.join(', ')})` : '';
  return withTip(
    group,
    `rank ${device.rank}, ${device.model}${more}\n${formatBytes(device.peak_bytes)} of ` +
      `${formatBytes(device.memory_bytes)} at the peak, ${formatShare(share)}`,
  );
}
