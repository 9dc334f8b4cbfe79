// Pointer and keys on the timeline: point at a block, drag and wheel to move, arrows from block to block.

function timelineHands(canvas, model, {zoom, pan, whole, paint, status}) {
  const {timeline, state, laneHeight, end} = model;

  const spanAt = (offsetX, offsetY) => {
    const lane = Math.floor((offsetY - LANE.top) / laneHeight);
    if (!timeline.lanes[lane] || !model.time) return null;
    const within = offsetY - LANE.top - lane * laneHeight;
    const time = model.time(offsetX);
    const isMeasured = model.measured && within > model.bar;
    const spans = isMeasured ? (model.measured.lanes[lane] || {spans: []}).spans : timeline.lanes[lane].spans;
    const index = spans.findIndex((span) => span[0] <= time && time <= span[1]);
    return {lane, index, time, isMeasured, spans};
  };

  const textAt = (found) => {
    if (found.isMeasured) {
      const span = found.spans[found.index];
      return span && `measured: ${spanName(span)}\n${formatSeconds(span[1] - span[0])}, from ${formatSeconds(span[0])}`;
    }
    if (found.index >= 0) return spanText(model, found.lane, found.index);
    const next = found.spans.findIndex((span) => span[0] > found.time);
    if (next < 0 || found.time < 0 || found.time > timeline.step_seconds) return null;
    const waits = timeline.waits[`${found.lane}:${next}`];
    const then = `then ${spanName(found.spans[next])} at ${formatSeconds(found.spans[next][0])}`;
    return `waiting${waits ? `: ${waits}` : ''}\n${then}`;
  };

  let drag = null;
  canvas.addEventListener('pointermove', (event) => {
    if (drag) {
      const by = ((drag.x - event.clientX) / (canvas.clientWidth - LANE.left)) * (state.to - state.from);
      if (Math.abs(event.clientX - drag.x) > 2) drag.moved = true;
      drag.x = event.clientX;
      pan(by);
      return;
    }
    const box = canvas.getBoundingClientRect();
    const found = spanAt(event.clientX - box.left, event.clientY - box.top);
    const text = found && textAt(found);
    if (text) showTip(text, event.clientX, event.clientY);
    else hideTip();
  });
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('pointerdown', (event) => {
    drag = {x: event.clientX, moved: false};
    hideTip();
  });
  window.addEventListener('pointerup', () => {
    drag = null;
  });
  canvas.addEventListener('click', (event) => {
    const box = canvas.getBoundingClientRect();
    const found = spanAt(event.clientX - box.left, event.clientY - box.top);
    if (found && found.index >= 0 && !found.isMeasured) choose(found.lane, found.index);
  });
  canvas.addEventListener(
    'wheel',
    (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        pan(((event.deltaX || event.deltaY) / 800) * (state.to - state.from));
      else zoom(Math.exp(-event.deltaY * 0.002), model.time(event.clientX - canvas.getBoundingClientRect().left));
    },
    {passive: false},
  );

  const choose = (lane, index) => {
    state.lane = lane;
    state.span = index;
    const [start, stop] = timeline.lanes[lane].spans[index];
    if (start < state.from || stop > state.to) pan((start + stop) / 2 - (state.from + state.to) / 2);
    status.textContent = spanText(model, lane, index).replaceAll('\n', '; ');
    paint();
  };

  canvas.addEventListener('keydown', (event) => {
    const spans = timeline.lanes[state.lane].spans;
    const last = timeline.lanes.length - 1;
    const near = (lane) => {
      const at = spans[state.span] ? (spans[state.span][0] + spans[state.span][1]) / 2 : 0;
      const there = timeline.lanes[lane].spans;
      return there.reduce(
        (best, span, index) =>
          Math.abs(span[0] + span[1] - 2 * at) < Math.abs(there[best][0] + there[best][1] - 2 * at) ? index : best,
        0,
      );
    };
    const middle = (state.from + state.to) / 2;
    if (event.key === 'ArrowRight') {
      if (spans[state.span + 1]) choose(state.lane, state.span + 1);
    } else if (event.key === 'ArrowLeft') {
      if (spans[state.span - 1]) choose(state.lane, state.span - 1);
    } else if (event.key === 'ArrowDown' && state.lane < last) {
      if (timeline.lanes[state.lane + 1].spans.length) choose(state.lane + 1, near(state.lane + 1));
    } else if (event.key === 'ArrowUp' && state.lane > 0) {
      if (timeline.lanes[state.lane - 1].spans.length) choose(state.lane - 1, near(state.lane - 1));
    } else if (event.key === '+' || event.key === '=') zoom(1.6, spans[state.span] ? spans[state.span][0] : middle);
    else if (event.key === '-') zoom(0.625, middle);
    else if (event.key === '0') whole();
    else if (event.key === 'Home') pan(-end);
    else if (event.key === 'End') pan(end);
    else if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
    event.preventDefault();
  });
}
