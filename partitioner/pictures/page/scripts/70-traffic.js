// Traffic: who sends how much to whom, as a matrix of shades with numbers, and the busiest links.

const PAIRS_LISTED = 20;

function drawTraffic(plan) {
  const {pairs: all, labels, links} = plan.traffic;
  if (!all.length && !links.length) return [el('p', {class: 'note'}, 'Nothing is sent between devices in this plan.')];
  const largest = [...all].sort((a, b) => b[2] - a[2]);
  return [
    el(
      'div',
      {class: 'side'},
      el(
        'div',
        null,
        all.length > 0 && [
          el('h3', null, 'From row to column, in a step'),
          scrolling('Traffic matrix', trafficMatrix(labels, all)),
          tableOnDemand('The largest flows as a table', () =>
            table(
              `The ${Math.min(PAIRS_LISTED, all.length)} largest of ${all.length}`,
              ['from', 'to', 'bytes in a step'],
              largest.slice(0, PAIRS_LISTED).map(([from, to, bytes]) => [labels[from], labels[to], formatBytes(bytes)]),
              [2],
            ),
          ),
        ],
      ),
      el('div', null, links.length > 0 && [el('h3', null, 'Busiest links'), busiestLinks(links)]),
    ),
  ];
}

function trafficMatrix(labels, pairs) {
  const count = labels.length;
  const longest = Math.max(...labels.map((label) => Math.min(label.length, 21)));
  const cell =
    count <= 10
      ? Math.min(96, Math.max(62, 6.4 * longest + 8))
      : count <= 20
        ? 44
        : count <= 40
          ? 22
          : Math.max(5, Math.floor(760 / count));
  const written = cell >= 40;
  const height = written ? 30 : cell;
  const left = Math.min(150, 12 + 6.4 * longest);
  const most = Math.max(...pairs.map((pair) => pair[2]));
  const every = Math.max(1, Math.ceil(13 / height));
  const named = written ? 1 : Math.max(1, Math.ceil(60 / cell));
  const chart = svg('svg', {
    class: 'heat',
    viewBox: `0 0 ${left + count * cell + 30} ${24 + count * height + 4}`,
    width: left + count * cell + 30,
    role: 'img',
    'aria-label': `Traffic between ${count} groups of devices; the largest flows are in the table below`,
  });
  labels.forEach((label, index) => {
    if (index % every === 0)
      chart.append(
        svg('text', {x: left - 6, y: 24 + index * height + height / 2 + 4, 'text-anchor': 'end'}, shortEnd(label, 21)),
      );
    if (index % named === 0)
      chart.append(
        svg(
          'text',
          {x: left + index * cell + cell / 2, y: 16, 'text-anchor': named === 1 ? 'middle' : 'start'},
          shortEnd(label.replace(/^ranks? /, ''), written ? Math.floor(cell / 6.2) : 9),
        ),
      );
  });
  chart.append(
    svg('rect', {class: 'cell', x: left, y: 24, width: count * cell, height: count * height, fill: 'var(--bg)'}),
  );
  for (const [row, column, bytes] of pairs) {
    const strength = Math.round(12 + 50 * Math.sqrt(bytes / most));
    const place = {x: left + column * cell, y: 24 + row * height};
    const square = svg('rect', {
      class: 'cell',
      ...place,
      width: cell,
      height,
      fill: `color-mix(in srgb, var(--c0) ${strength}%, var(--surface))`,
    });
    chart.append(withTip(square, `${labels[row]} → ${labels[column]}\n${formatBytes(bytes)} in a step`));
    if (written)
      chart.append(
        svg(
          'text',
          {x: place.x + cell / 2, y: place.y + height / 2 + 4, 'text-anchor': 'middle', 'pointer-events': 'none'},
          cell > 50 ? formatBytes(bytes) : formatBytes(bytes).replace('iB', '').replace(' ', ''),
        ),
      );
  }
  return chart;
}

function busiestLinks(links) {
  const bar = (share) =>
    svg(
      'svg',
      {width: 90, height: 12, 'aria-hidden': 'true'},
      svg('rect', {width: 90, height: 12, rx: 2, fill: 'var(--sunken)'}),
      svg('rect', {width: 90 * Math.min(1, share), height: 12, rx: 2, fill: share > 0.5 ? 'var(--c5)' : 'var(--c0)'}),
    );
  const sorted = [...links].sort((a, b) => b[2] - a[2]);
  return table(
    'Share of the step in which the link carries something',
    ['link', 'sent', 'busy', 'as a bar'],
    sorted
      .slice(0, PAIRS_LISTED)
      .map(([name, bytes, share]) => [name, formatBytes(bytes), formatShare(share), bar(share)]),
    [1, 2],
  );
}
