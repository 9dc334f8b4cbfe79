// Memory over time, stacked by kind, with the line of what the device has; and the peaks of all lanes as bars.

const MEMORY_PATTERNS = [null, null, null, null, 'url(#hatch-a)', 'url(#hatch-b)', 'url(#hatch-d)'];
const LANES_LISTED = 24;

function memoryPaint(index) {
  return `color-mix(in srgb, ${colour(index)} 62%, var(--surface))`;
}

function drawMemory(plan) {
  const lanes = plan.memory.lanes;
  if (!lanes.length) return [el('p', {class: 'note'}, 'This plan holds no course of its memory.')];
  const order = lanes.map((_, index) => index).sort((a, b) => fullness(lanes[b]) - fullness(lanes[a]));
  const figure = el('figure');
  const overview = el('div', {class: 'lanes-overview'});
  const most = Math.max(...lanes.map(memoryTop));
  const show = (index) => {
    figure.replaceChildren(...memoryFigure(lanes[index], plan.timeline && plan.timeline.step_seconds));
    for (const button of overview.querySelectorAll('button'))
      button.setAttribute('aria-pressed', String(button.dataset.lane === String(index)));
  };
  const add = (indices) =>
    indices.forEach((index) => overview.append(...overviewRow(lanes[index], index, most, show)));
  add(order.slice(0, LANES_LISTED));
  const more =
    order.length > LANES_LISTED &&
    button(`Show all ${order.length} lanes`, () => {
      add(order.slice(LANES_LISTED));
      more.remove();
    });
  show(order[0]);
  return [
    memoryLegend(lanes),
    el('h3', null, 'Peak of every device, fullest first'),
    overview,
    more,
    figure,
    tableOnDemand('What holds the peak, as a table', () => memoryTable(lanes)),
  ];
}

function fullness(lane) {
  return lane.capacity_bytes ? lane.peak_bytes / lane.capacity_bytes : lane.peak_bytes;
}

/** The top of a lane's scale: what the device has, unless the plan needs so little that nothing would be seen. */
function memoryTop(lane) {
  const sparse = lane.peak_bytes < 0.1 * lane.capacity_bytes;
  return sparse ? lane.peak_bytes * 1.2 : Math.max(lane.peak_bytes, lane.capacity_bytes);
}

/** The kinds that any lane holds something of, with their index. */
function memoryKinds(lane) {
  return lane.kinds
    .map((kind, index) => [kind, index])
    .filter(([, index]) => lane.stacks[index].some((value) => value > 0));
}

function memoryLegend(lanes) {
  const kinds = new Map(lanes.flatMap((lane) => memoryKinds(lane)));
  const sorted = [...kinds].sort((a, b) => a[1] - b[1]);
  return legend(
    'Kinds of memory',
    sorted.map(([kind, index]) => [swatch(memoryPaint(index), MEMORY_PATTERNS[index]), kind]),
  );
}

/** The bytes that a lane holds at one of its moments. */
function heldAt(lane, at) {
  return lane.stacks.reduce((total, stack) => total + stack[at], 0);
}

/** The place in a lane's times where the sum is greatest. */
function peakIndex(lane) {
  return lane.seconds.reduce((best, _, at) => (heldAt(lane, at) > heldAt(lane, best) ? at : best), 0);
}

function overviewRow(lane, index, most, show) {
  const at = peakIndex(lane);
  let left = 0;
  const bars = lane.stacks.map((stack, kind) => {
    const width = (stack[at] / most) * 100;
    const place = {x: `${left}%`, y: 1, width: `${width}%`, height: 16};
    left += width;
    return width > 0 && patterned('rect', place, memoryPaint(kind), MEMORY_PATTERNS[kind]);
  });
  const capacity = `${(lane.capacity_bytes / most) * 100}%`;
  return [
    button(short(lane.label, 60), () => show(index), {'data-lane': index, 'aria-pressed': 'false'}),
    svg(
      'svg',
      {'aria-hidden': 'true'},
      bars,
      lane.capacity_bytes <= most &&
        svg('line', {x1: capacity, x2: capacity, y1: 0, y2: 18, stroke: 'var(--bad)', 'stroke-width': 2.5}),
    ),
    el(
      'span',
      null,
      `${formatBytes(lane.peak_bytes)} of ${formatBytes(lane.capacity_bytes)}, ${formatShare(fullness(lane))}`,
    ),
  ];
}

function memoryFigure(lane, step) {
  const size = {width: twoPlans ? 640 : 1240, height: 320, left: 74, right: 16, top: 26, bottom: 30};
  const end = step || lane.seconds[lane.seconds.length - 1] || 1;
  const top = memoryTop(lane) * 1.06;
  const x = (time) => size.left + (Math.min(time, end) / end) * (size.width - size.left - size.right);
  const words =
    `Memory of ${lane.label}: peak ${formatBytes(lane.peak_bytes)} at ${formatSeconds(lane.peak_at)} ` +
    `of ${formatBytes(lane.capacity_bytes)}`;
  const {chart, y, across} = emptyChart(size, words, top, ticks(top, 5, 1024), formatBytes);
  for (const time of ticks(end, 6))
    chart.append(
      svg('text', {class: 'muted', x: x(time), y: size.height - 10, 'text-anchor': 'middle'}, formatSeconds(time)),
    );
  const base = lane.seconds.map(() => 0);
  for (const [, index] of memoryKinds(lane)) {
    const lower = [...base];
    lane.stacks[index].forEach((value, at) => {
      base[at] += value;
    });
    const d = stairs(lane.seconds, base, lower, end, x, y);
    chart.append(svg('path', {class: 'area', d, fill: memoryPaint(index)}));
    if (MEMORY_PATTERNS[index]) chart.append(svg('path', {d, fill: MEMORY_PATTERNS[index]}));
  }
  if (lane.capacity_bytes) {
    const above = lane.capacity_bytes > top;
    const place = {x: size.width - size.right, y: above ? 14 : y(lane.capacity_bytes) - 5, 'text-anchor': 'end'};
    const text = `the device has ${formatBytes(lane.capacity_bytes)}${above ? ', far above' : ''}`;
    if (!above) chart.append(svg('line', {class: 'capacity', ...across(lane.capacity_bytes)}));
    chart.append(svg('text', {class: 'capacity-text', ...place}, text));
  }
  const peak = {x: x(lane.peak_at), y: y(lane.peak_bytes)};
  const late = lane.peak_at > end * 0.75;
  const look = {class: 'halo', 'text-anchor': late ? 'end' : 'start', 'font-weight': 650};
  const dot = {r: 4.5, fill: 'var(--text)', stroke: 'var(--surface)', 'stroke-width': 1.5};
  chart.append(
    svg('circle', {cx: peak.x, cy: peak.y, ...dot}),
    svg('text', {x: peak.x + (late ? -9 : 9), y: peak.y - 8, ...look}, `peak ${formatBytes(lane.peak_bytes)}`),
  );
  memoryCursor(chart, lane, end, size, x);
  return [
    el('figcaption', null, `Memory of ${lane.label} in a step`),
    chart,
    lane.peak_text && el('p', null, lane.peak_text),
  ].filter(Boolean);
}

/** An area that keeps each value until the next time: memory is taken and given back at once. */
function stairs(seconds, upper, lower, end, x, y) {
  const there = [];
  const back = [];
  seconds.forEach((time, at) => {
    const until = at + 1 < seconds.length ? seconds[at + 1] : Math.max(end, time);
    if (until === time) return; // of several changes at one moment the last one counts
    there.push(`${x(time).toFixed(1)} ${y(upper[at]).toFixed(1)}L${x(until).toFixed(1)} ${y(upper[at]).toFixed(1)}`);
    back.unshift(`${x(until).toFixed(1)} ${y(lower[at]).toFixed(1)}L${x(time).toFixed(1)} ${y(lower[at]).toFixed(1)}`);
  });
  return `M${there.join('L')}L${back.join('L')}Z`;
}

function memoryCursor(chart, lane, end, size, x) {
  const line = svg('line', {class: 'cursor', y1: size.top, y2: size.height - size.bottom, visibility: 'hidden'});
  chart.append(line);
  chart.addEventListener('pointermove', (event) => {
    const box = chart.getBoundingClientRect();
    const time =
      ((((event.clientX - box.left) / box.width) * size.width - size.left) / (size.width - size.left - size.right)) *
      end;
    const at = lane.seconds.findLastIndex((second) => second <= time);
    if (at < 0 || time > end) {
      hideTip();
      line.setAttribute('visibility', 'hidden');
      return;
    }
    fill(line, {x1: x(time), x2: x(time), visibility: 'visible'}, []);
    const kinds = memoryKinds(lane)
      .filter(([, index]) => lane.stacks[index][at] > 0)
      .reverse();
    const held = kinds.map(([kind, index]) => `${kind} ${formatBytes(lane.stacks[index][at])}`);
    const sum = `${formatBytes(heldAt(lane, at))} at ${formatSeconds(time)}`;
    showTip([sum, ...held].join('\n'), event.clientX, event.clientY);
  });
  chart.addEventListener('pointerleave', () => {
    hideTip();
    line.setAttribute('visibility', 'hidden');
  });
}

function memoryTable(lanes) {
  const kinds = lanes[0].kinds;
  return table(
    'Bytes held at the peak',
    ['devices', 'peak', 'at', ...kinds, 'capacity'],
    lanes.map((lane) => {
      const at = peakIndex(lane);
      return [
        lane.label,
        formatBytes(lane.peak_bytes),
        formatSeconds(lane.peak_at),
        ...lane.stacks.map((stack) => formatBytes(stack[at])),
        formatBytes(lane.capacity_bytes),
      ];
    }),
    [1, 2, ...kinds.map((_, index) => index + 3), kinds.length + 3],
  );
}
