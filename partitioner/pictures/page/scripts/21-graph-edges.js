// Arrows between the boxes of one open box: tensors that pass, and bridges with their bytes. Computed once per box.

/** Arrows between shown children, what comes in from outside, and the bridges that lie inside of each child. */
function edgesOf(box, graph) {
  const place = box.kind === 'fold' ? box.members[box.shown] : box;
  if (place.edges) return place.edges;
  const children = shownChildren(box);
  const owner = new Int32Array(graph.ops.length).fill(-1);
  children.forEach((child, index) => {
    for (const op of child.ops) owner[op] = index;
  });
  const between = new Map();
  const edge = (from, to) => {
    const key = from * children.length + to;
    if (!between.has(key)) between.set(key, {from: children[from], to: children[to], tensors: new Set(), bridges: []});
    return between.get(key);
  };
  const inlets = new Set();
  children.forEach((child, index) => {
    for (const op of child.ops) {
      for (const source of graph.ops[op][4]) {
        if (owner[source] === -1) inlets.add(index);
        else if (owner[source] !== index) edge(owner[source], index).tensors.add(source);
      }
    }
  });
  const inside = new Map();
  for (const bridge of graph.bridges) {
    const from = owner[bridge.from];
    const to = owner[bridge.to];
    if (from === -1 || to === -1) continue;
    if (from === to) {
      inside.set(from, [...(inside.get(from) || []), bridge]);
    } else if (between.has(to * children.length + from) && !between.has(from * children.length + to)) {
      edge(to, from).bridges.push(bridge); // of a gradient, which goes against the arrow of its tensor
    } else {
      edge(from, to).bridges.push(bridge);
    }
  }
  place.edges = {
    between: [...between.values()],
    inlets: [...inlets].map((index) => children[index]),
    inside: new Map([...inside].map(([index, bridges]) => [children[index].id, bridges])),
  };
  return place.edges;
}

const BRIDGE_LOOKS = {
  'send/recv': 'send',
  slice: 'send',
  'all-gather': 'gather',
  'all-to-all': 'gather',
  'reduce-scatter': 'sum',
  'all-reduce': 'sum',
};

function bridgeLook(kind) {
  return BRIDGE_LOOKS[kind] || 'send';
}

/** Bytes; of a graph that knows none, its costs. */
function bridgeAmount(bytes, cost, unit) {
  return unit ? formatCost(cost, unit) : formatBytes(bytes);
}

/** Bridges as short lines: kind, how many, bytes. `gradient`: it goes back, from the reader of a value to its maker. */
function bridgeLines(bridges) {
  const sums = new Map();
  for (const bridge of bridges) {
    const sum = sums.get(bridge.kind) || {kind: bridge.kind, unit: bridge.unit, there: [0, 0, 0], back: [0, 0, 0]};
    const way = bridge.gradient ? sum.back : sum.there;
    way[0] += 1;
    way[1] += bridge.size_bytes;
    way[2] += bridge.cost || 0;
    sums.set(bridge.kind, sum);
  }
  const line = ({kind, unit}, [count, bytes, cost], words) => ({
    kind,
    bytes,
    text: `${kind}${count > 1 ? ` ${count}×` : ''} ${bridgeAmount(bytes, cost, unit)}${words}`,
  });
  return [...sums.values()]
    .flatMap((sum) => {
      const {there, back} = sum;
      if (there[0] === back[0] && there[1] === back[1]) return [line(sum, there, ' each way')];
      return [there[0] && line(sum, there, ''), back[0] && line(sum, back, ' back')].filter(Boolean);
    })
    .sort((a, b) => b.bytes - a.bytes);
}
