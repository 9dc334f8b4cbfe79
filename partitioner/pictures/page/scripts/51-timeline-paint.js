// The timeline's canvas: what is drawn for the part of the step that is in sight.

function timelinePaints() {
  const paints = {};
  for (const name of ['text', 'muted', 'line', 'strong', 'surface', 'bg', 'accent', 'critical', 'sunken'])
    paints[name] = computedColour(`var(--${name})`);
  paints.pale = Array.from({length: COLOURS}, (_, index) => computedColour(tint(index)));
  paints.deep = Array.from({length: COLOURS}, (_, index) => computedColour(deepTint(index)));
  paints.rest = computedColour('color-mix(in srgb, var(--strong) 45%, var(--surface))');
  paints.idle = idlePattern(paints.line);
  return paints;
}

const KIND_ORDER = {F: 0, B: 1, I: 1, W: 2, R: 3, O: 6};

function paintOf(paints, span, by) {
  const [, , kind, stage, microbatch] = span;
  const index = by === 'kind' ? (KIND_ORDER[kind] ?? 7) : by === 'stage' ? stage : microbatch;
  if (index < 0) return paints.rest;
  return (kind === 'F' ? paints.pale : paints.deep)[index % COLOURS];
}

function paintTimeline(canvas, model) {
  const {timeline, measured, critical, state, laneHeight, bar, height} = model;
  const width = canvas.clientWidth;
  if (!width) return;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const theme = document.documentElement.dataset.theme;
  if (!model.paints || model.theme !== theme) {
    model.paints = timelinePaints();
    model.theme = theme;
  }
  const paints = model.paints;
  const pen = canvas.getContext('2d');
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = paints.bg;
  pen.fillRect(0, 0, width, height);
  const inner = width - LANE.left - 10;
  const x = (time) => LANE.left + ((time - state.from) / (state.to - state.from)) * inner;
  model.x = x;
  model.time = (at) => state.from + ((at - LANE.left) / inner) * (state.to - state.from);
  paintAxis(pen, model, width, height, x);
  timeline.lanes.forEach((lane, index) => {
    const top = LANE.top + index * laneHeight;
    pen.save();
    pen.beginPath();
    pen.rect(LANE.left, top - 3, inner + 4, laneHeight);
    pen.clip();
    paintIdle(pen, paints, x(0), x(timeline.step_seconds), top, bar);
    lane.spans.forEach((span, spanIndex) => {
      if (span[1] < state.from || span[0] > state.to) return;
      const chosen = state.lane === index && state.span === spanIndex;
      paintSpan(pen, model, span, x, top, bar, {
        critical: state.critical && critical.has(`${index}:${spanIndex}`),
        chosen,
      });
    });
    const below = measured && measured.lanes[index];
    if (below) {
      for (const span of below.spans)
        if (span[1] >= state.from && span[0] <= state.to)
          paintSpan(pen, model, span, x, top + bar + 2, LANE.measured, {});
    }
    pen.restore();
    if (bar >= 12 || index % 2 === 0) paintLaneLabel(pen, paints, lane, top, bar, Boolean(below));
  });
  if (state.transfers) paintTransfers(pen, model, x, inner);
}

function paintAxis(pen, model, width, height, x) {
  const {state, paints, timeline} = model;
  pen.font = '11.5px system-ui, "DejaVu Sans", sans-serif';
  pen.textBaseline = 'middle';
  const step = ticks(state.to - state.from, Math.max(2, Math.floor(width / 150)))[1] || state.to;
  pen.textAlign = 'center';
  for (let time = Math.ceil(state.from / step) * step; time <= state.to * 1.0001; time += step) {
    pen.fillStyle = paints.line;
    pen.fillRect(x(time), 18, 1, height);
    pen.fillStyle = paints.muted;
    if (x(time) < width - 30)
      pen.fillText(formatSeconds(Math.abs(time) < step / 1e6 ? 0 : time), Math.max(x(time), LANE.left + 10), 10);
  }
  if (timeline.step_seconds >= state.from && timeline.step_seconds <= state.to) {
    pen.fillStyle = paints.text;
    pen.fillRect(x(timeline.step_seconds) - 0.5, 18, 1.5, height);
  }
}

function paintIdle(pen, paints, from, to, top, height) {
  pen.fillStyle = paints.surface;
  pen.fillRect(from, top, to - from, height);
  pen.fillStyle = paints.idle;
  pen.fillRect(from, top, to - from, height);
}

/** A tile of slanted lines, for the time in which a lane waits. */
function idlePattern(line) {
  const tile = el('canvas', {width: 8, height: 8});
  const pen = tile.getContext('2d');
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.stroke(new Path2D('M-2 2L2 -2M0 8L8 0M6 10L10 6'));
  return pen.createPattern(tile, 'repeat');
}

function paintSpan(pen, model, span, x, top, height, {critical, chosen}) {
  const {paints, state, timeline} = model;
  const left = x(span[0]);
  const width = Math.max(0.75, x(span[1]) - left);
  pen.fillStyle = paintOf(paints, span, state.paint);
  pen.fillRect(left, top, width, height);
  if (width > 3) {
    pen.strokeStyle = paints.surface;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
  }
  const inside = height > 20 ? insideOf(timeline, span) : 0;
  if (inside > 0 && width > 4) {
    pen.fillStyle = paints.text;
    pen.fillRect(left, top + height - 4, width * Math.min(1, inside / (span[1] - span[0])), 4);
  }
  const label = span[2] + (span[4] >= 0 ? span[4] : '');
  const visible = Math.min(left + width, model.x(state.to)) - Math.max(left, LANE.left);
  if (visible > 8 * label.length + 4) {
    pen.fillStyle = paints.text;
    pen.textAlign = 'center';
    pen.font = `${height > 20 ? 12 : 10}px system-ui, "DejaVu Sans", sans-serif`;
    pen.fillText(label, Math.max(left, LANE.left) + visible / 2, top + height / 2 - (inside > 0 ? 1 : 0));
  }
  if (critical || chosen) {
    pen.strokeStyle = chosen ? paints.accent : paints.critical;
    pen.lineWidth = chosen ? 3.5 : 2;
    pen.strokeRect(left + 1, top + 1, Math.max(1, width - 2), height - 2);
  }
}

function paintLaneLabel(pen, paints, lane, top, bar, measured) {
  pen.fillStyle = paints.text;
  pen.textAlign = 'left';
  pen.font = `600 ${bar < 12 ? 10 : 12}px system-ui, "DejaVu Sans", sans-serif`;
  pen.fillText(short(lane.label, 16), 8, top + Math.min(11, bar / 2), LANE.left - 14);
  if (bar < 30) return;
  pen.fillStyle = paints.muted;
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  const stages =
    lane.stages.length > 4 ? `${lane.stages[0]}…${lane.stages[lane.stages.length - 1]}` : lane.stages.join(', ');
  if (lane.stages.length) pen.fillText(`${lane.stages.length > 1 ? 'stages' : 'stage'} ${stages}`, 8, top + 26);
  if (measured) pen.fillText('measured', 8, top + bar + 9);
}

function paintTransfers(pen, model, x, inner) {
  const {timeline, state, laneHeight, bar, paints} = model;
  const seen = timeline.transfers.filter(([start, end]) => end >= state.from && start <= state.to);
  if (seen.length > TRANSFERS_SHOWN * 4) return;
  pen.save();
  pen.beginPath();
  pen.rect(LANE.left, 0, inner + 4, model.height);
  pen.clip();
  pen.globalAlpha = seen.length > TRANSFERS_SHOWN ? 0.35 : 0.8;
  for (const [start, end, from, to, , , gradient] of seen) {
    const down = to > from;
    const y0 = LANE.top + from * laneHeight + (down ? bar : 0);
    const y1 = LANE.top + to * laneHeight + (down ? 0 : bar);
    const x0 = x(start);
    const x1 = Math.max(x(end), x0 + 1);
    pen.strokeStyle = paints.text;
    pen.fillStyle = paints.text;
    pen.setLineDash(gradient ? [4, 3] : []);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    const angle = Math.atan2(y1 - y0, x1 - x0);
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x1 - 6 * Math.cos(angle - 0.4), y1 - 6 * Math.sin(angle - 0.4));
    pen.lineTo(x1 - 6 * Math.cos(angle + 0.4), y1 - 6 * Math.sin(angle + 0.4));
    pen.fill();
  }
  pen.restore();
}
