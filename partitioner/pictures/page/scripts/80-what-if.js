// What if: the step time against one thing that changes, a small chart each, and where the plan would flip.

function drawWhatIf(plan) {
  const {series, flips} = plan.what_if;
  return [
    el('div', {class: 'charts'}, series.map(whatIfFigure)),
    flips.length > 0 && titled('Where another plan would win', list(null, flips)),
    tableOnDemand('What if, as tables', () =>
      el(
        'div',
        null,
        series.map((one) =>
          table(
            one.title,
            [one.unit ? `${one.title} (${one.unit})` : one.title, 'step', 'fits', 'note'],
            one.points.map((point) => [
              pointName(point, one),
              point.step_seconds === null ? '–' : formatSeconds(point.step_seconds),
              point.fits ? 'yes' : 'no',
              point.text || '',
            ]),
            [1],
          ),
        ),
      ),
    ),
  ];
}

function pointName(point, one) {
  return `${formatCount(point.x)}${one.unit === '×' ? '×' : one.unit ? ` ${one.unit}` : ''}`;
}

function pointText(point, one) {
  const time = point.step_seconds === null ? 'no time' : formatSeconds(point.step_seconds);
  return `${pointName(point, one)}: ${time}${point.fits ? '' : ', does not fit'}`;
}

function whatIfFigure(one) {
  const size = {width: 340, height: 190, left: 58, right: 22, top: 14, bottom: 32};
  const timed = one.points.filter((point) => point.step_seconds !== null);
  const xs = one.points.map((point) => point.x);
  const log = Math.min(...xs) > 0 && Math.max(...xs) / Math.min(...xs) >= 4;
  const at = (value) => (log ? Math.log(value) : value);
  const [low, high] = [at(Math.min(...xs)), at(Math.max(...xs))];
  const top = Math.max(1e-12, ...timed.map((point) => point.step_seconds)) * 1.12;
  const x = (value) =>
    size.left + (high > low ? (at(value) - low) / (high - low) : 0.5) * (size.width - size.left - size.right);
  const words = `${one.title}: ${one.points.map((point) => pointText(point, one)).join('; ')}`;
  const {chart, y} = emptyChart(size, words, top, ticks(top, 4), formatSeconds, 5);
  let lastLabel = -Infinity;
  for (const point of one.points) {
    const name = short(pointName(point, one), 12);
    if (x(point.x) - lastLabel < 6.5 * name.length + 4) continue;
    lastLabel = x(point.x);
    chart.append(svg('text', {class: 'muted', x: x(point.x), y: size.height - 12, 'text-anchor': 'middle'}, name));
  }
  if (timed.length > 1)
    chart.append(
      svg('path', {class: 'series', d: `M${timed.map((point) => `${x(point.x)} ${y(point.step_seconds)}`).join('L')}`}),
    );
  for (const point of one.points) chart.append(whatIfPoint(point, one, x(point.x), y(point.step_seconds ?? 0)));
  return el(
    'figure',
    null,
    el('figcaption', null, one.title),
    chart,
    one.note && el('p', {class: 'note'}, short(one.note, LONG_TEXT)),
  );
}

function whatIfPoint(point, one, x, y) {
  const mark = point.fits
    ? svg('circle', {class: 'point', cx: x, cy: y, r: 4.5})
    : svg('path', {
        class: 'point misfit',
        d: `M${x - 5} ${y - 5}L${x + 5} ${y + 5}M${x - 5} ${y + 5}L${x + 5} ${y - 5}`,
      });
  const text = pointText(point, one);
  return withTip(mark, point.text ? `${text}\n${point.text}` : text);
}
