// Zoom, pan and minimap: one transform on the picture, and a small copy that shows which part of it is on the screen.

function makeCamera(pane, canvas, world, minimap, size) {
  let view = {x: 0, y: 0, k: 1};

  const apply = () => {
    world.setAttribute('transform', `translate(${view.x.toFixed(2)} ${view.y.toFixed(2)}) scale(${view.k.toFixed(4)})`);
    const frame = minimap.querySelector('.view');
    const {width, height} = canvas.getBoundingClientRect();
    if (frame)
      fill(frame, {x: -view.x / view.k, y: -view.y / view.k, width: width / view.k, height: height / view.k}, []);
  };

  const zoomAt = (factor, x, y) => {
    const k = Math.min(3, Math.max(0.04, view.k * factor));
    view = {x: x - ((x - view.x) * k) / view.k, y: y - ((y - view.y) * k) / view.k, k};
    apply();
  };

  const zoom = (factor) => {
    const {width, height} = canvas.getBoundingClientRect();
    zoomAt(factor, width / 2, height / 2);
  };

  /** Show everything; of a tall picture the whole width, from the top, so that text stays readable. */
  const fit = () => {
    const {width, height} = canvas.getBoundingClientRect();
    const {width: w, height: h} = size();
    const whole = Math.min(width / (w + 40), height / (h + 40));
    const k = Math.max(Math.min(1.1, whole), Math.min(0.6, width / (w + 40)));
    view = {x: (width - w * k) / 2, y: h * k > height ? 14 : (height - h * k) / 2, k};
    apply();
  };

  /** Bring a place of the picture into sight, moving as little as possible. */
  const show = (item, centre = false) => {
    const {width, height} = canvas.getBoundingClientRect();
    if (view.k < (centre ? 0.9 : 0.5)) view.k = 0.9;
    const left = item.x * view.k + view.x;
    const top = item.y * view.k + view.y;
    const w = item.width * view.k;
    const h = item.height * view.k;
    const cut = w < width - 20 ? left < 8 || left + w > width - 8 : left + w < 40 || left > width - 60;
    if (centre || cut) view.x += width / 2 - (left + w / 2);
    if (centre || top < 8 || top + Math.min(h, height - 20) > height - 8) {
      view.y += (h > height - 40 || !centre ? 24 : height / 2 - h / 2) - top;
    }
    apply();
  };

  /** Keep a place where it was on the screen while everything around it moves. */
  const hold = (before, after) => {
    view.x += (before.x - after.x) * view.k;
    view.y += (before.y - after.y) * view.k;
    apply();
  };

  const drawMinimap = (boxes) => {
    const {width, height} = size();
    minimap.setAttribute('viewBox', `-20 -20 ${width + 40} ${height + 40}`);
    minimap.replaceChildren(
      ...boxes
        .filter((item) => item.level < 5)
        .map((item) =>
          svg('rect', {
            class: `mini${item.open ? ' open' : ''}`,
            x: item.x,
            y: item.y,
            width: item.width,
            height: item.height,
            'vector-effect': 'non-scaling-stroke',
          }),
        ),
      svg('rect', {class: 'view', 'vector-effect': 'non-scaling-stroke'}),
    );
    apply();
  };

  window.addEventListener('beforeprint', () => {
    // Paper has a size of its own: the whole picture, however large the page draws it.
    canvas.setAttribute('viewBox', `-10 -10 ${size().width + 20} ${size().height + 20}`);
    world.removeAttribute('transform');
  });
  window.addEventListener('afterprint', () => {
    canvas.removeAttribute('viewBox');
    apply();
  });

  let drag = null;
  canvas.addEventListener('pointerdown', (event) => {
    drag = {x: event.clientX, y: event.clientY, from: {...view}, moved: false};
  });
  window.addEventListener('pointermove', (event) => {
    if (!drag) return;
    const dx = event.clientX - drag.x;
    const dy = event.clientY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) {
      drag.moved = true;
      pane.classList.add('moving');
    }
    if (drag.moved) {
      view = {...drag.from, x: drag.from.x + dx, y: drag.from.y + dy};
      apply();
    }
  });
  const release = () => {
    if (drag) {
      pane.dataset.moved = drag.moved ? 'yes' : '';
      drag = null;
      pane.classList.remove('moving');
    }
  };
  window.addEventListener('pointerup', release);
  window.addEventListener('pointercancel', release);
  canvas.addEventListener(
    'wheel',
    (event) => {
      if (!event.ctrlKey && !event.metaKey && !pane.contains(document.activeElement)) return; // the page scrolls
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoomAt(
        Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)),
        event.clientX - box.left,
        event.clientY - box.top,
      );
    },
    {passive: false},
  );
  minimap.addEventListener('pointerdown', (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(minimap.getScreenCTM().inverse());
    const {width, height} = canvas.getBoundingClientRect();
    view = {...view, x: width / 2 - point.x * view.k, y: height / 2 - point.y * view.k};
    apply();
    event.stopPropagation();
  });
  return {zoom, fit, show, hold, apply, drawMinimap, wasDragged: () => pane.dataset.moved === 'yes'};
}
