// Which boxes are open. Never more than BOX_LIMIT boxes at once: what was opened longest ago closes first.

const BOX_LIMIT = 300;

function makeOpenBoxes(root) {
  const open = new Map(); // box → when it was last opened or looked into
  let clock = 0;

  const touch = (box) => {
    clock += 1;
    open.set(box, clock);
  };
  const isOpen = (box) => open.has(box);

  const visible = () => {
    const found = [];
    const walk = (box, level) => {
      found.push({box, level});
      if (isOpen(box)) for (const child of shownChildren(box)) walk(child, level + 1);
    };
    walk(root, 1);
    return found;
  };

  /** Open a box and all that hold it. Returns {opened, closed: boxes closed for it, reason}. */
  const openBox = (box) => {
    const keep = new Set([...holders(box), box]);
    const before = new Map(open);
    for (const one of keep) if (canOpen(one)) touch(one);
    const closed = [];
    while (visible().length > BOX_LIMIT) {
      const [oldest] = [...open]
        .filter(([one]) => !keep.has(one) && one.parent && isShown(one))
        .sort((a, b) => a[1] - b[1]);
      if (!oldest) {
        open.clear();
        for (const [one, time] of before) open.set(one, time);
        return {
          opened: false,
          closed: [],
          reason:
            `${box.label} shows ${plural(shownChildren(box).length, 'box', 'boxes')}, and no more than ${BOX_LIMIT} ` +
            'are drawn at once. Close something around it first.',
        };
      }
      open.delete(oldest[0]);
      closed.push(oldest[0]);
    }
    return {opened: true, closed, reason: ''};
  };

  const isShown = (box) => holders(box).every(isOpen) && shownInFold(box);

  /** Tell whether the blocks that a box lies in are those that their folds show. */
  const shownInFold = (box) => {
    for (let one = box; one.parent; one = one.parent) {
      if (one.parent.kind === 'fold' && one.parent.members[one.parent.shown] !== one) return false;
    }
    return true;
  };

  /** Make a box visible: open all that hold it and turn folds to the block that it lies in. */
  const reveal = (box) => {
    for (let one = box; one.parent; one = one.parent) {
      if (one.parent.kind === 'fold') one.parent.shown = one.parent.members.indexOf(one);
    }
    const parent = holder(box);
    return parent ? openBox(parent) : {opened: true, closed: [], reason: ''};
  };

  return {isOpen, visible, openBox, reveal, close: (box) => open.delete(box), count: () => visible().length};
}

/** Open the first boxes for a reader who has just come: the largest modules while the picture stays small. */
function openFirst(boxes, opened, enough = 32) {
  opened.openBox(boxes.root);
  for (;;) {
    const next = opened
      .visible()
      .map((one) => one.box)
      .filter(
        (box) =>
          !opened.isOpen(box) && box.kind === 'module' && !/^\d+$/.test(box.label) && shownChildren(box).length > 1,
      )
      .sort((a, b) => b.ops.length - a.ops.length)[0];
    if (!next || opened.count() + shownChildren(next).length > enough) return;
    opened.openBox(next);
  }
}
