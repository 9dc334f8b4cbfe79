// How stages, kinds and micro-batches are told apart: a colour, a shape with a number in it, and from the ninth a hatch.

const COLOURS = 8;
const SHAPES = 6;
const HATCHES = ['', 'hatch-a', 'hatch-b', 'hatch-c', 'hatch-d'];

/** The colour of a stage, micro-batch or kind; gray for -1. */
function colour(index) {
  return index < 0 ? 'var(--strong)' : `var(--c${index % COLOURS})`;
}

/** The colour thinned so that text stands on it. */
function tint(index) {
  return `color-mix(in srgb, ${colour(index)} var(--tint), var(--surface))`;
}

function deepTint(index) {
  return `color-mix(in srgb, ${colour(index)} var(--deep), var(--surface))`;
}

/** The hatch that tells stage 8 from stage 0, and so on; null for the first eight. */
function hatch(index) {
  const round = Math.floor(index / COLOURS) % HATCHES.length;
  return index < 0 || round === 0 ? null : `url(#${HATCHES[round]})`;
}

/** The patterns of all hatches, once in the page. */
function hatchPatterns() {
  const line = (d) => svg('path', {d, stroke: 'var(--text)', 'stroke-width': 1, opacity: 0.42, fill: 'none'});
  const pattern = (id, ...marks) => svg('pattern', {id, width: 8, height: 8, patternUnits: 'userSpaceOnUse'}, marks);
  return svg(
    'svg',
    {width: 0, height: 0, 'aria-hidden': 'true', class: 'unseen'},
    svg(
      'defs',
      null,
      pattern('hatch-a', line('M-2 2L2 -2M0 8L8 0M6 10L10 6')),
      pattern('hatch-b', svg('circle', {cx: 4, cy: 4, r: 1.3, fill: 'var(--text)', opacity: 0.45})),
      pattern('hatch-c', line('M0 4H8')),
      pattern('hatch-d', line('M0 0L8 8M8 0L0 8')),
      pattern('hatch-idle', line('M0 8L8 0')),
    ),
  );
}

/** The outline of a shape around (0, 0), `r` from its middle. */
function shapePath(index, r) {
  const corners = (count, turn) =>
    Array.from({length: count}, (_, i) => {
      const angle = turn + (2 * Math.PI * i) / count;
      return `${(Math.cos(angle) * r).toFixed(1)} ${(Math.sin(angle) * r).toFixed(1)}`;
    }).join('L');
  switch (((index % SHAPES) + SHAPES) % SHAPES) {
    case 0:
      return `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`;
    case 1:
      return `M${-r * 0.9} ${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`;
    case 2:
      return `M${corners(4, 0)}Z`;
    case 3:
      return `M${corners(6, 0)}Z`;
    case 4:
      return `M${corners(5, -Math.PI / 2)}Z`;
    default:
      return `M${corners(8, Math.PI / 8)}Z`;
  }
}

/** A stage's sign as an SVG group around (0, 0): its shape in its colour, with its number. */
function sign(index, r = 9) {
  const label = index < 0 ? '–' : String(index);
  return svg(
    'g',
    null,
    svg('path', {
      d: shapePath(Math.max(index, 0), r + (index % SHAPES === 2 ? 2 : 0)),
      fill: tint(index),
      stroke: colour(index),
      'stroke-width': 2,
    }),
    svg('text', {y: 3.6, 'text-anchor': 'middle', 'font-size': label.length > 2 ? 7.5 : 10, 'font-weight': 650}, label),
  );
}

/** A stage's sign as a picture of its own, for legends and text. */
function badge(index) {
  const mark = sign(index, 9);
  mark.setAttribute('transform', 'translate(12 12)');
  return svg('svg', {class: 'badge', width: 24, height: 24, 'aria-hidden': 'true'}, mark);
}

/** A shape in a colour, and a pattern over it if there is one. */
function patterned(shape, place, paint, pattern) {
  return [svg(shape, {...place, fill: paint}), pattern && svg(shape, {...place, fill: pattern})];
}

/** A sign moved to a place of a picture. */
function signAt(index, x, y) {
  const mark = sign(index, 8);
  mark.setAttribute('transform', `translate(${x} ${y})`);
  return mark;
}

/** A small square of a colour, for legends. */
function swatch(paint, pattern) {
  const place = {x: 0.5, y: 0.5, width: 15, height: 15, rx: 2};
  return svg(
    'svg',
    {width: 16, height: 16, 'aria-hidden': 'true'},
    svg('rect', {...place, fill: paint, stroke: 'var(--strong)'}),
    pattern && svg('rect', {...place, fill: pattern}),
  );
}

/** The stages of a plan as a legend: sign, name, devices. */
function stageLegend(plan) {
  return legend(
    'Stages',
    plan.stages.map((stage, index) => [badge(index), `${short(stage.name, 40)} · ${short(stage.devices, 48)}`]),
  );
}

/** A colour as the canvas wants it: worked out by the browser from the style sheet of the theme in use. */
function computedColour(expression) {
  const probe = el('span', {class: 'unseen'});
  probe.style.color = expression;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** An empty chart with words for a screen reader, and lines for the values of its vertical axis, 0 to `top`. */
function emptyChart(size, label, top, values, format, gap = 6) {
  const y = (value) => size.height - size.bottom - (value / top) * (size.height - size.top - size.bottom);
  const across = (value) => ({x1: size.left, x2: size.width - size.right, y1: y(value), y2: y(value)});
  const lines = values.map((value) => [
    svg('line', {class: 'axis', ...across(value)}),
    svg('text', {class: 'muted', x: size.left - gap, y: y(value) + 4, 'text-anchor': 'end'}, format(value)),
  ]);
  const viewBox = `0 0 ${size.width} ${size.height}`;
  return {chart: svg('svg', {class: 'chart', viewBox, role: 'img', 'aria-label': label}, lines), y, across};
}
