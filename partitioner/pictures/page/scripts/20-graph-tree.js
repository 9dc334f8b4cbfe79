// The model as boxes: modules in modules, folds of equal blocks, ops. A box knows its parent and its ops; nothing is drawn.
//
//   module   holds modules and ops            fold     equal blocks one after another: one of them is shown at a time
//   part     a stretch of a long list of ops  pieces   the blocks of neurons of one op
//   op       one op; cannot be opened

const LIST_LIMIT = 60; // children of one box; a longer list is cut into parts, so that any box can be opened
const PART_SIZE = 30;
const CROWD = 12; // children of a module, from which on the small ops between its modules are drawn as one box
const RUN = 4; // ops in a row that are worth a box of their own

/** Build the boxes of a graph and return its root and the box of every op. */
function makeBoxes(graph) {
  const boxOfOp = new Array(graph.ops.length).fill(null);
  const byName = new Map();
  let count = 0;

  const box = (kind, parent, fields) => {
    count += 1;
    const none = {name: '', className: '', children: [], ops: [], members: null, shown: 0, times: 1};
    return {id: count, kind, parent, ...none, ...fields};
  };

  const fromNode = (node, parent) => {
    const name = node.name || '';
    if (node.times > 1 && node.members && node.members.length > 1) {
      const fold = box('fold', parent, {name, label: node.label, className: node.class, times: node.times});
      fold.members = node.members.map((member) => fromNode(member, fold));
      fold.ops = fold.members.flatMap((member) => member.ops);
      return fold;
    }
    const made = box('module', parent, {
      name,
      label: node.label || name || 'model',
      className: node.class,
      times: node.times || 1,
    });
    const inside = [...(node.children || []).map((child) => fromNode(child, made)), ...ownOps(node.ops || [], made)];
    inside.sort((a, b) => first(a) - first(b));
    made.ops = inside.flatMap((child) => child.ops);
    made.children = shorten(inside.length > CROWD ? gather(inside, made) : inside, made);
    if (name && !byName.has(name)) byName.set(name, made);
    return made;
  };

  const ownOps = (indices, parent) => {
    const groups = new Map();
    const found = [];
    for (const index of indices) {
      const whole = graph.ops[index][7];
      if (whole === undefined || whole < 0) found.push(opBox(index, parent));
      else if (groups.has(whole)) groups.get(whole).push(index);
      else groups.set(whole, [index]);
    }
    for (const group of groups.values()) {
      if (group.length === 1) {
        found.push(opBox(group[0], parent));
        continue;
      }
      const [name, kind] = graph.ops[group[0]];
      const pieces = box('pieces', parent, {name, label: `${graph.kinds[kind].op} in ${group.length} pieces`, ops: group});
      const blocks = group.map((index) => opBox(index, pieces));
      pieces.children = shorten(blocks, pieces);
      found.push(pieces);
    }
    return found;
  };

  const opBox = (index, parent) => {
    const [name, kind] = graph.ops[index];
    boxOfOp[index] = box('op', parent, {name, label: graph.kinds[kind].op, op: index, ops: [index]});
    return boxOfOp[index];
  };

  /** Put boxes that follow each other into one. */
  const partOf = (label, children, parent) => {
    const part = box('part', parent, {label, ops: children.flatMap((child) => child.ops)});
    for (const child of children) child.parent = part;
    part.children = shorten(children, part);
    return part;
  };

  /** Put ops that follow each other between two modules into one part, named after the op that takes longest. */
  const gather = (children, parent) => {
    if (children.every((child) => child.kind === 'op')) return children;
    const found = [];
    let run = [];
    const close = () => {
      if (run.length < RUN) found.push(...run);
      else {
        const seconds = (child) => graph.kinds[graph.ops[child.op][1]].forward_seconds;
        const main = run.reduce((best, child) => (seconds(child) > seconds(best) ? child : best));
        found.push(partOf(`${main.label} and ${run.length - 1} more`, run, parent));
      }
      run = [];
    };
    for (const child of children) {
      if (child.kind === 'op') run.push(child);
      else {
        close();
        found.push(child);
      }
    }
    close();
    return found;
  };

  const shorten = (children, parent) => {
    if (children.length <= LIST_LIMIT) return children;
    const size = Math.max(Math.ceil(children.length / LIST_LIMIT), PART_SIZE);
    const count = Math.ceil(children.length / size);
    return Array.from({length: count}, (_, number) =>
      partOf(`part ${number + 1} of ${count}`, children.slice(number * size, (number + 1) * size), parent),
    );
  };

  const root = fromNode(graph.tree, null);
  return {root, boxOfOp, byName, count};
}

function first(box) {
  return box.ops.length ? box.ops.reduce((least, op) => (op < least ? op : least), Infinity) : Infinity;
}

/** The boxes that an open box shows. A fold shows the inside of one of its blocks. */
function shownChildren(box) {
  return box.kind === 'fold' ? box.members[box.shown].children : box.children;
}

function canOpen(box) {
  return box.kind !== 'op' && shownChildren(box).length > 0;
}

/** The box that holds this one on the screen: a fold's blocks are never drawn themselves. */
function holder(box) {
  const parent = box.parent;
  return parent && parent.parent && parent.parent.kind === 'fold' ? parent.parent : parent;
}

/** The boxes that hold this one on the screen, outermost first. */
function holders(box) {
  const found = [];
  for (let next = holder(box); next; next = holder(next)) found.unshift(next);
  return found;
}

/** The stages of a box with their numbers of ops, most first; computed once. */
function stagesOf(box, graph) {
  if (!box.stages) {
    const counts = new Map();
    for (const op of box.ops) counts.set(graph.ops[op][2], (counts.get(graph.ops[op][2]) || 0) + 1);
    if (counts.size > 1) counts.delete(-1);
    box.stages = [...counts].sort((a, b) => a[0] - b[0]);
  }
  return box.stages;
}

const AMOUNTS = [
  'forward_flops',
  'backward_flops',
  'output_bytes',
  'saved_bytes',
  'forward_seconds',
  'backward_seconds',
  'cost',
];

/** The sums of a box's ops; computed once. */
function sumsOf(box, graph) {
  if (!box.sums) {
    const sums = {parameters: new Set(), ...Object.fromEntries(AMOUNTS.map((field) => [field, 0]))};
    for (const op of box.ops) {
      const kind = graph.kinds[graph.ops[op][1]];
      for (const field of AMOUNTS) sums[field] += kind[field] || 0;
      for (const parameter of graph.ops[op][5]) sums.parameters.add(parameter);
    }
    sums.parameter_bytes = [...sums.parameters].reduce((sum, index) => sum + graph.parameters[index].size_bytes, 0);
    box.sums = sums;
  }
  return box.sums;
}
