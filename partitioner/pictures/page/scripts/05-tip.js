// The small text beside the pointer.

const tip = document.getElementById('tip');

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}

function hideTip() {
  tip.hidden = true;
}

/** Show text while the pointer is over an element. */
function withTip(element, text) {
  element.addEventListener('pointermove', (event) =>
    showTip(typeof text === 'function' ? text() : text, event.clientX, event.clientY),
  );
  element.addEventListener('pointerleave', hideTip);
  return element;
}
