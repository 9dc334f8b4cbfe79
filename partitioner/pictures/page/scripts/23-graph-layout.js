// Places of boxes: each open box lays out its own children, from the inside out, and keeps the result until something in it
// opens or closes. So one click lays out one box and those around it, whatever the model's size.

const SIZE = {width: 176, height: 44, title: 30, edge: 14};

/** Lay out a box and all that is open inside of it: sizes, and places of children relative to their parent. */
function layOut(box, graph, opened) {
  const signature = openSignature(box, opened);
  if (box.layout && box.layout.signature === signature) return box.layout;
  const made = opened.isOpen(box)
    ? layOutOpen(box, graph, opened)
    : {width: closedWidth(box), height: SIZE.height, children: [], edges: []};
  made.signature = signature;
  box.layout = made;
  return made;
}

function openSignature(box, opened) {
  if (!opened.isOpen(box)) return '';
  return `${box.id}.${box.shown}(${shownChildren(box)
    .map((child) => openSignature(child, opened))
    .join('')})`;
}

function closedWidth(box) {
  return box.kind === 'op' ? SIZE.width : SIZE.width + 74;
}

function layOutOpen(box, graph, opened) {
  const children = shownChildren(box);
  const {between} = edgesOf(box, graph);
  const net = new dagre.graphlib.Graph();
  net.setGraph({
    rankdir: 'TB',
    nodesep: 26,
    ranksep: 30,
    edgesep: 10,
    marginx: 0,
    marginy: 0,
    ranker: children.length > 25 ? 'longest-path' : 'network-simplex',
  });
  net.setDefaultEdgeLabel(() => ({}));
  for (const child of children) {
    const {width, height} = layOut(child, graph, opened);
    net.setNode(String(child.id), {width, height});
  }
  for (const edge of between) {
    const label = edge.bridges.length
      ? {width: 150, height: 16 * bridgeLines(edge.bridges).length + 8, labelpos: 'c'}
      : {};
    net.setEdge(String(edge.from.id), String(edge.to.id), label);
  }
  dagre.layout(net);
  const {width, height} = net.graph();
  const titleWidth = box.kind === 'fold' ? 340 : 240;
  const inner = Math.max(width, titleWidth);
  const shift = SIZE.edge + (inner - width) / 2;
  const down = SIZE.title + SIZE.edge;
  return {
    width: inner + 2 * SIZE.edge,
    height: height + down + SIZE.edge,
    children: children.map((child) => {
      const node = net.node(String(child.id));
      return {box: child, x: node.x - node.width / 2 + shift, y: node.y - node.height / 2 + down};
    }),
    edges: between.map((edge) => {
      const found = net.edge(String(edge.from.id), String(edge.to.id));
      return {
        edge,
        points: found.points.map((point) => ({x: point.x + shift, y: point.y + down})),
        label: edge.bridges.length ? {x: found.x + shift, y: found.y + down} : null,
      };
    }),
  };
}

/** All visible boxes and arrows with places on the whole picture. */
function placed(root, graph, opened) {
  const boxes = [];
  const edges = [];
  const walk = (box, x, y, level) => {
    const layout = layOut(box, graph, opened);
    boxes.push({box, x, y, width: layout.width, height: layout.height, level});
    for (const edge of layout.edges) {
      edges.push({
        ...edge,
        points: edge.points.map((point) => ({x: point.x + x, y: point.y + y})),
        label: edge.label && {x: edge.label.x + x, y: edge.label.y + y},
      });
    }
    for (const child of layout.children) walk(child.box, x + child.x, y + child.y, level + 1);
  };
  walk(root, 0, 0, 1);
  return {boxes, edges, width: boxes[0].width, height: boxes[0].height};
}
