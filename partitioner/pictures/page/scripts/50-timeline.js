// The timeline: a lane per kind of rank, a block per computation, on a canvas that draws only what is in sight.

const LANE = {height: 34, gap: 8, left: 128, top: 26, measured: 14};
const SPAN_WORDS = {
  F: 'forward',
  B: 'backward',
  I: 'backward of inputs',
  W: 'backward of weights',
  R: 'sum of gradients',
  O: 'optimizer',
};
const TRANSFERS_SHOWN = 400; // more lines at once than that are a grey wall

function drawTimeline(plan, other) {
  const timeline = plan.timeline;
  const measured = timeline.measured;
  const bar = barHeight(timeline.lanes.length);
  const laneHeight = bar + (measured ? LANE.measured + 2 : 0) + (bar < 12 ? 2 : LANE.gap);
  const end = Math.max(endOf(timeline), other && other.timeline ? endOf(other.timeline) : 0); // two plans: one scale
  const critical = new Set(timeline.critical.map(([lane, span]) => `${lane}:${span}`));
  const state = {
    from: 0,
    to: end,
    lane: 0,
    span: -1,
    paint: 'microbatch',
    transfers: timeline.transfers.length <= TRANSFERS_SHOWN,
    critical: true,
  };
  const height = LANE.top + timeline.lanes.length * laneHeight + 6;
  const canvas = el('canvas', {tabindex: '0', role: 'img', 'aria-label': timelineWords(timeline)});
  const pane = el(
    'div',
    {class: 'timeline-pane', tabindex: '0', role: 'group', 'aria-label': 'Timeline of a step'},
    canvas,
  );
  const status = el(
    'p',
    {class: 'status', 'aria-live': 'polite'},
    'Point at a block, or focus the picture and use the arrow keys. + and − zoom, 0 shows the whole step.',
  );
  const model = {plan, bar, timeline, measured, critical, state, laneHeight, end, height};

  let waiting = false;
  const paint = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paintTimeline(canvas, model);
    });
  };
  const look = (from, span) => {
    state.from = Math.max(0, Math.min(end - span, from));
    state.to = state.from + span;
    paint();
  };
  const zoom = (factor, at) => {
    const span = Math.min(end, Math.max(end / 5000, (state.to - state.from) / factor));
    look(at - ((at - state.from) / (state.to - state.from)) * span, span);
  };
  const pan = (by) => look(state.from + by, state.to - state.from);
  const whole = () => look(0, end);
  timelineHands(canvas, model, {zoom, pan, whole, paint, status});

  new ResizeObserver(paint).observe(canvas);
  window.addEventListener('themechange', paint);
  window.addEventListener('beforeprint', () => paintTimeline(canvas, model));
  const check = (name, text) =>
    el(
      'label',
      null,
      el('input', {
        type: 'checkbox',
        checked: state[name],
        onchange: (event) => {
          state[name] = event.target.checked;
          paint();
        },
      }),
      text,
    );
  const select = el(
    'select',
    {
      onchange: () => {
        state.paint = select.value;
        paint();
      },
    },
    [
      ['microbatch', 'micro-batch'],
      ['kind', 'kind of work'],
      ['stage', 'stage'],
    ].map(([value, text]) => el('option', {value}, text)),
  );
  const middle = () => (state.from + state.to) / 2;
  return [
    el(
      'div',
      {class: 'tools'},
      button('Zoom in', () => zoom(1.6, middle())),
      button('Zoom out', () => zoom(0.625, middle())),
      button('Whole step', whole),
      el('label', null, 'colour by', select),
      timeline.transfers.length > 0 && check('transfers', 'transfers between lanes'),
      timeline.critical.length > 0 && check('critical', 'critical path'),
    ),
    timelineLegend(timeline),
    timeline.hidden_lanes > 0 && el('p', {class: 'note'}, `${plural(timeline.hidden_lanes, 'further lane')} left out.`),
    pane,
    status,
    timeline.inside.length > 0 && insideTable(timeline),
    tableOnDemand('The timeline as a table', () => timelineTable(timeline)),
  ];
}

/** The end of everything on a timeline, predicted and measured. */
function endOf(timeline) {
  const lanes = [...timeline.lanes, ...(timeline.measured ? timeline.measured.lanes : [])];
  return lanes.flatMap((lane) => lane.spans).reduce((most, span) => Math.max(most, span[1]), timeline.step_seconds);
}

/** The height of a lane's blocks: less where there are many lanes, as a canvas cannot be taller than some 30,000 pixels. */
function barHeight(lanes) {
  return lanes <= 40 ? LANE.height : lanes <= 120 ? 20 : 8;
}

function timelineWords(timeline) {
  const count = timeline.lanes.reduce((sum, lane) => sum + lane.spans.length, 0);
  const size = `${plural(timeline.lanes.length, 'lane')}, ${plural(count, 'block')}`;
  return `Timeline of a step of ${formatSeconds(timeline.step_seconds)}: ${size}. A table of the same follows below.`;
}

function timelineLegend(timeline) {
  const kinds = [...new Set(timeline.lanes.flatMap((lane) => lane.spans.map((span) => span[2])))];
  const mark = (look) =>
    svg('svg', {width: 22, height: 16, 'aria-hidden': 'true'}, svg('rect', look));
  const foot = {x: 0, y: 12, width: 14, height: 4, fill: 'var(--text)'};
  const frame = {x: 1, y: 2, width: 20, height: 12, fill: 'none', stroke: 'var(--critical)', 'stroke-width': 2.5};
  return legend('Blocks', [
    ...kinds.map((kind) => [el('strong', null, kind), SPAN_WORDS[kind] || kind]),
    [swatch(tint(0)), 'forward, pale'],
    [swatch(deepTint(0)), 'backward, deep'],
    'the number is the micro-batch',
    [swatch('var(--surface)', 'url(#hatch-idle)'), 'waiting (bubble)'],
    timeline.inside.length > 0 && [mark(foot), 'bar at the foot: share spent in collectives'],
    timeline.critical.length > 0 && [mark(frame), 'on the critical path'],
    timeline.measured && 'lower, thinner row: as measured',
  ]);
}

function insideTable(timeline) {
  return titled(
    'Collectives inside of the computations',
    table(
      'Per micro-batch: part of the blocks above',
      ['stage', 'kind', 'along', 'during', 'times', 'bytes each', 'take together'],
      timeline.inside.map((item) => [
        el('span', null, badge(item.stage), ` stage ${item.stage}`),
        item.kind,
        item.axis || '–',
        item.backward ? 'backward' : 'forward',
        formatCount(item.count),
        formatBytes(item.size_bytes),
        formatSeconds(item.seconds),
      ]),
      [4, 5, 6],
    ),
  );
}

function timelineTable(timeline) {
  const rows = timeline.lanes
    .flatMap((lane, laneIndex) => lane.spans.map((span, index) => [span[0], laneIndex, index]))
    .slice(0, 2000);
  const total = timeline.lanes.reduce((sum, lane) => sum + lane.spans.length, 0);
  return table(
    total > rows.length
      ? `The first ${rows.length} of ${formatCount(total)} blocks, lane by lane`
      : 'All blocks, lane by lane',
    ['lane', 'work', 'from', 'to', 'takes', 'waits for'],
    rows.map(([, lane, index]) => {
      const [start, end] = timeline.lanes[lane].spans[index];
      return [
        timeline.lanes[lane].label,
        spanName(timeline.lanes[lane].spans[index]),
        formatSeconds(start),
        formatSeconds(end),
        formatSeconds(end - start),
        timeline.waits[`${lane}:${index}`] || '',
      ];
    }),
    [2, 3, 4],
  );
}

function spanName([, , kind, stage, microbatch]) {
  const batch = microbatch >= 0 ? ` of micro-batch ${microbatch}` : '';
  return `${SPAN_WORDS[kind] || kind}${batch}${stage >= 0 ? `, stage ${stage}` : ''}`;
}

/** Everything about one block, as text. */
function spanText(model, lane, index) {
  const {timeline, critical} = model;
  const span = timeline.lanes[lane].spans[index];
  const key = `${lane}:${index}`;
  const inside = insideOf(timeline, span);
  const more = timeline.lanes[lane].text && timeline.lanes[lane].text[index];
  return [
    `${timeline.lanes[lane].label}: ${spanName(span)}`,
    `${formatSeconds(span[1] - span[0])}, from ${formatSeconds(span[0])} to ${formatSeconds(span[1])}`,
    inside > 0 && `${formatSeconds(inside)} of it in collectives`,
    timeline.waits[key],
    critical.has(key) && 'on the critical path: shortening it shortens the step',
    more,
  ]
    .filter(Boolean)
    .join('\n');
}

/** Seconds of a block that its collectives take. */
function insideOf(timeline, [, , kind, stage]) {
  if (stage < 0 || !'FBI'.includes(kind)) return 0;
  const isBackward = kind !== 'F';
  return timeline.inside.reduce(
    (sum, item) => sum + (item.stage === stage && item.backward === isBackward ? item.seconds : 0),
    0,
  );
}
