// Arrows go to the nearest box that way; Enter opens, Escape closes; plus, minus and 0 zoom.

const WAYS = {ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0]};

/** The nearest box in a direction. Boxes around or inside of the present one count only where they are next in line. */
function nearest(items, from, [dx, dy]) {
  const middle = (item) => ({x: item.x + item.width / 2, y: item.open ? item.y + 12 : item.y + item.height / 2});
  const here = middle(from);
  let best = null;
  let least = Infinity;
  for (const item of items) {
    if (item === from) continue;
    const there = middle(item);
    const along = (there.x - here.x) * dx + (there.y - here.y) * dy;
    const aside = Math.abs((there.x - here.x) * dy) + Math.abs((there.y - here.y) * dx);
    if (along < 4 || aside > along * 3 + 40) continue;
    const cost = along + aside * 2;
    if (cost < least) {
      least = cost;
      best = item;
    }
  }
  return best;
}
