// The placement graph put together: boxes, arrows, camera, keys, search and details.

function drawPlacement(plan, other) {
  const graph = plan.graph;
  if (!graph)
    return [el('p', {class: 'note'}, 'This plan file holds no graph of the model, so there is nothing to draw here.')];
  const boxes = makeBoxes(graph);
  const opened = makeOpenBoxes(boxes.root);
  const differs = other && other.graph && differenceTest(plan, other);
  openFirst(boxes, opened);

  const canvas = svg('svg', {class: 'canvas', 'aria-label': 'Placement graph', role: 'group'});
  const world = svg('g', {class: 'world'});
  const size = {refX: 7.5, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: 'userSpaceOnUse'};
  const arrow = svg('path', {class: 'arrow', d: 'M0 0L8 4L0 8Z'});
  const marker = svg('marker', {id: 'arrow', viewBox: '0 0 8 8', orient: 'auto', ...size}, arrow);
  canvas.append(svg('defs', null, marker), world);
  const minimap = svg('svg', {class: 'minimap', 'aria-hidden': 'true'});
  const details = el('aside', {
    class: 'graph-details',
    'aria-label': `Details of the chosen box of ${short(plan.title, 80)}`,
    tabindex: '0',
  });
  const status = el('p', {class: 'status'});
  const pane = el('div', {class: 'graph-pane'}, canvas, minimap);
  let picture = null;
  let items = new Map(); // box → its place on the picture
  let elements = new Map();
  let chosen = null;
  const camera = makeCamera(pane, canvas, world, minimap, () => picture);

  const redraw = () => {
    picture = placed(boxes.root, graph, opened);
    items = new Map(picture.boxes.map((item) => [item.box, Object.assign(item, {open: opened.isOpen(item.box)})]));
    world.replaceChildren(...drawGraph(picture, graph, opened, differs));
    elements = new Map([...world.querySelectorAll('.box')].map((element) => [Number(element.dataset.id), element]));
    camera.drawMinimap(picture.boxes);
    if (chosen && !items.has(chosen)) chosen = null;
    mark(chosen || boxes.root);
  };

  const mark = (box) => {
    for (const element of world.querySelectorAll('.box[tabindex="0"], .box.selected')) {
      element.setAttribute('tabindex', '-1');
      element.setAttribute('aria-selected', 'false');
      element.classList.remove('selected');
    }
    const element = elements.get(box.id);
    element.setAttribute('tabindex', '0');
    if (box !== chosen) return;
    element.setAttribute('aria-selected', 'true');
    element.classList.add('selected');
    for (const edge of world.querySelectorAll('.edge')) {
      edge.classList.toggle('lit', edge.dataset.from === String(box.id) || edge.dataset.to === String(box.id));
    }
  };

  /** Choose a box that is on the screen: mark it and write its details. */
  const select = (box, focus = true) => {
    chosen = box;
    mark(box);
    details.replaceChildren(...(box.kind === 'op' ? opDetails(box, view) : groupDetails(box, view)).filter(Boolean));
    details.scrollTop = 0;
    if (focus) elements.get(box.id).focus({preventScroll: true});
  };

  /** Choose any box: whatever hides it opens first. */
  const choose = (box) => {
    const result = opened.reveal(box);
    say(result);
    if (!result.opened) return;
    redraw();
    const target = items.has(box) ? box : box.parent; // a block of a fold: the fold shows it now
    select(target);
    camera.show(items.get(target), true);
  };

  const say = ({closed, reason}) => {
    status.textContent =
      reason ||
      (closed.length
        ? `Closed to stay within ${BOX_LIMIT} boxes: ${closed.map((box) => short(box.label, 40)).join(', ')}.`
        : boxCount());
    if (reason || closed.length) announce(status.textContent);
  };
  const boxCount = () =>
    `${plural(opened.count(), 'box', 'boxes')} shown of ${formatCount(boxes.count)}; ` +
    `${plural(graph.ops.length, 'op')} in the model.`;

  const toggle = (box) => {
    const before = items.get(box);
    if (opened.isOpen(box)) opened.close(box);
    else {
      const result = opened.openBox(box);
      say(result);
      if (!result.opened) return;
    }
    redraw();
    if (!items.has(box)) return;
    if (before) camera.hold(before, items.get(box));
    select(box);
    camera.show(items.get(box));
    if (!status.textContent.startsWith('Closed')) status.textContent = boxCount();
  };

  const view = {
    graph,
    plan,
    boxes,
    choose,
    toggle,
    isOpen: opened.isOpen,
    showMember: (fold, index) => {
      fold.shown = index;
      opened.openBox(fold);
      redraw();
      select(fold, false);
      camera.show(items.get(fold));
    },
  };

  const boxAt = (event) => {
    const element = event.target.closest('.box');
    return element && [...items.keys()].find((box) => box.id === Number(element.dataset.id));
  };
  canvas.addEventListener('click', (event) => {
    const box = boxAt(event);
    if (!box || camera.wasDragged()) return;
    const wasChosen = chosen === box;
    select(box);
    if (canOpen(box) && (!opened.isOpen(box) || wasChosen)) toggle(box);
  });
  canvas.addEventListener('keydown', (event) => {
    const box = boxAt(event);
    if (!box) return;
    if (WAYS[event.key]) {
      const next = nearest([...items.values()], items.get(box), WAYS[event.key]);
      if (next) {
        select(next.box);
        camera.show(next);
      }
    } else if (event.key === 'Enter' || event.key === ' ') {
      if (canOpen(box)) {
        if (!opened.isOpen(box)) toggle(box);
        else select(box);
      } else {
        select(box);
        announce(details.textContent.slice(0, 400));
      }
    } else if (event.key === 'Escape') {
      const target = opened.isOpen(box) && box.parent ? box : holder(box);
      if (target && target.parent) toggle(target);
    } else if (event.key === '+' || event.key === '=') camera.zoom(1.25);
    else if (event.key === '-') camera.zoom(0.8);
    else if (event.key === '0') camera.fit();
    else return;
    event.preventDefault();
  });

  const tool = (label, text, press) => button(text, press, {'aria-label': label, title: label});
  pane.append(
    el(
      'div',
      {class: 'zoom'},
      tool('Zoom in', '+', () => camera.zoom(1.25)),
      tool('Zoom out', '−', () => camera.zoom(0.8)),
      tool('Show everything', 'Fit', camera.fit),
    ),
  );
  redraw();
  details.append(
    el(
      'p',
      {class: 'muted'},
      'Choose a box to read about it. A click or Enter opens a box, Escape closes it, arrow keys move, + − 0 zoom.',
    ),
    ...groupDetails(boxes.root, view).filter(Boolean),
  );
  status.textContent = boxCount();
  afterShown(pane, () => camera.fit());
  return [
    el(
      'div',
      {class: 'tools'},
      makeSearch(
        searchEntries(graph, boxes),
        (entry) => choose(entry.box),
        `Search the graph of ${short(plan.title, 80)}`,
      ),
      tool('Close all boxes but the first', 'Fold all', () => {
        for (const {box} of opened.visible().reverse()) if (box.parent) opened.close(box);
        openFirst(boxes, opened);
        redraw();
        camera.fit();
        status.textContent = boxCount();
      }),
    ),
    stageLegend(plan),
    bridgeLegend(graph),
    el('div', {class: 'graph'}, pane, details),
    status,
  ];
}

function bridgeLegend(graph) {
  const kinds = [...new Set(graph.bridges.map((bridge) => bridge.kind))];
  const looks = [['', 'a tensor passes'], ...kinds.map((kind) => [`bridge ${bridgeLook(kind)}`, kind])];
  const line = (look) =>
    svg('svg', {width: 34, height: 10, 'aria-hidden': 'true'}, svg('path', {class: `edge ${look}`, d: 'M0 5H34'}));
  return legend(
    'Arrows',
    looks.map(([look, text]) => [line(look), text]),
  );
}

/** Tell of a box whether any of its ops lies on other devices in the other plan. Ops are matched by name. */
function differenceTest(plan, other) {
  const devices = (where, stage) => (where.stages[stage] ? where.stages[stage].devices : '');
  const elsewhere = new Map(other.graph.ops.map(([name, , stage]) => [name, devices(other, stage)]));
  const moved = plan.graph.ops.map(
    ([name, , stage]) => elsewhere.has(name) && elsewhere.get(name) !== devices(plan, stage),
  );
  return (box) => {
    if (box.moved === undefined) box.moved = box.ops.some((op) => moved[op]);
    return box.moved;
  };
}
