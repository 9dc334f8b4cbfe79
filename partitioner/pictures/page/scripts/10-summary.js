// Summary: the big numbers, how a step divides, the fullest device, and the reasons in words.

const DIVISION = {
  // place in the palette, hatch and words of each part of a step
  compute: [0, null, 'computing'],
  communication: [1, 'hatch-a', 'communicating'],
  'gradient sums': [5, 'hatch-d', 'summing gradients'],
  'waiting (bubble)': [-1, 'hatch-idle', 'waiting (bubble)'],
  bubble: [-1, 'hatch-idle', 'waiting (bubble)'],
  optimizer: [2, 'hatch-b', 'optimizer'],
};

const LONG_TEXT = 1500; // letters of one paragraph; only a hostile name is longer

function drawSummary(plan, other, summary = plan.summary) {
  return [
    factsList(summary.facts, other && other.summary.facts),
    stepBar(summary),
    summary.fullest && fullestLine(summary.fullest),
    el(
      'div',
      {class: 'words'},
      summary.sentences.map((part) => titled(part.title, paragraphs(part.text), part.exactly && exactly(part.exactly))),
    ),
    summary.alternatives.length > 0 && alternativesTable(summary),
    plan.stages.length > 0 && stagesTable(plan),
    summary.notes.length > 0 && titled('Notes', paragraphs(summary.notes, 'note')),
  ];
}

function paragraphs(lines, look = null) {
  return lines.map((line) => el('p', {class: look}, short(line, LONG_TEXT)));
}

/** The same in the search's own words, for those who want them. */
function exactly(lines) {
  return el('details', null, el('summary', null, 'Exactly what was searched, and how'), paragraphs(lines));
}

function factsList(facts, others) {
  const elsewhere = others && new Map(others.map((fact) => [fact.label, fact.value]));
  return el(
    'dl',
    {class: 'facts'},
    facts.map((fact) => {
      const differs = elsewhere && elsewhere.get(fact.label) !== fact.value;
      return el(
        'div',
        {class: differs ? 'changed-fact' : null},
        el('dt', null, short(fact.label, 120), differs && ' ', differs && el('span', {class: 'changed'}, '≠ differs')),
        el('dd', {class: fact.value.length > 22 ? 'long' : null}, short(fact.value, 300)),
        fact.note && el('dd', {class: 'small'}, short(fact.note, 300)),
      );
    }),
  );
}

function stepBar(summary) {
  const parts = summary.division.filter((part) => part.share > 0);
  if (!parts.length) return null;
  const look = (kind) => DIVISION[kind] || [3, 'hatch-c', kind];
  const text = (part) => `${look(part.kind)[2]} ${formatSeconds(part.seconds)} (${formatShare(part.share)})`;
  const fillOf = (pattern) => pattern && `url(#${pattern})`;
  let left = 0;
  const bars = parts.map((part) => {
    const [index, pattern, words] = look(part.kind);
    const place = {x: `${left * 100}%`, y: 0, width: `${part.share * 100}%`, height: 34};
    const middle = {x: `${(left + part.share / 2) * 100}%`, y: 21, 'text-anchor': 'middle'};
    left += part.share;
    const group = svg(
      'g',
      null,
      patterned('rect', place, tint(index), fillOf(pattern)),
      part.share > 0.12 && svg('text', {...middle, 'font-size': 12.5, 'font-weight': 600}, formatShare(part.share)),
    );
    return withTip(group, `${words}: ${formatSeconds(part.seconds)}, ${formatShare(part.share)} of the step`);
  });
  const entries = parts.map((part) => {
    const [index, pattern] = look(part.kind);
    return [swatch(tint(index), fillOf(pattern)), text(part)];
  });
  return titled(
    'How a step divides',
    svg('svg', {class: 'bar', role: 'img', 'aria-label': `A step: ${parts.map(text).join(', ')}`}, bars),
    list({class: 'legend'}, entries),
  );
}

function fullestLine(fullest) {
  const share = fullest.used_bytes / fullest.capacity_bytes;
  return el(
    'p',
    null,
    el('strong', null, 'Fullest device: '),
    `${fullest.device} holds ${formatBytes(fullest.used_bytes)} of ` +
      `${formatBytes(fullest.capacity_bytes)} at its peak, ${formatShare(share)}` +
      `${share > 1 ? ' — more than it has' : `, ${formatBytes(fullest.capacity_bytes - fullest.used_bytes)} to spare`}.`,
  );
}

function alternativesTable(summary) {
  const relative = (seconds) => {
    const ratio = seconds / summary.step_seconds;
    return Math.abs(ratio - 1) < 0.0005
      ? 'the same'
      : ratio >= 1
        ? `${ratio.toFixed(2)}× as long`
        : `${((1 - ratio) * 100).toFixed(1)} % shorter`;
  };
  return titled(
    'What other plans would cost',
    table(
      'Other plans beside this one',
      ['plan', 'step', 'beside this plan', 'peak memory', 'risk', 'fits', 'why'],
      summary.alternatives.map((other) => [
        other.name,
        other.step_seconds === null ? '–' : formatSeconds(other.step_seconds),
        other.step_seconds === null || !summary.step_seconds ? '–' : relative(other.step_seconds),
        other.peak_bytes === null ? '–' : formatBytes(other.peak_bytes),
        other.chance,
        other.feasible ? el('span', {class: 'yes'}, '✓ yes') : el('span', {class: 'no'}, '✗ no'),
        other.reason || '',
      ]),
      [1, 2, 3, 4],
    ),
  );
}

/** Columns of the stages' table. What a plan does not know of any stage is left out; it may bring some of its own. */
const STAGE_COLUMNS = [
  ['mesh', (stage) => stage.mesh],
  ['parameters', (stage) => stage.parameter_bytes, formatBytes],
  ['forward', (stage) => stage.forward_seconds, formatSeconds],
  ['backward', (stage) => stage.backward_seconds, formatSeconds],
  ['in flight', (stage) => stage.in_flight, String],
];

function stagesTable(plan) {
  const {stages} = plan;
  const own = (stages[0].facts || []).map(([title], at) => [title, (stage) => stage.facts[at][1]]);
  const columns = [...STAGE_COLUMNS, ...own].filter(([, value]) => stages.some((stage) => value(stage) !== null));
  const cell = (value, format) => (value === null ? '–' : format ? format(value) : value);
  return titled(
    stages.length > 1 ? 'Stages' : 'One stage',
    table(
      'Which devices compute what',
      ['stage', 'devices', 'modules', ...columns.map(([title]) => title)],
      stages.map((stage, index) => [
        el('span', null, badge(index), ' ', stage.name),
        stage.devices,
        stage.modules,
        ...columns.map(([, value, format]) => cell(value(stage), format)),
      ]),
      columns.flatMap(([title], at) => (title === 'mesh' ? [] : [at + 3])),
    ),
  );
}
