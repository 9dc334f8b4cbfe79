// The data of the page, and a place for what all sections share.
const unpacked = (key, value) => {
  if (!value) return value;
  if (value.__runs__) {
    const numbers = [];
    for (let at = 0; at < value.__runs__.length; at += 2) {
      for (let left = value.__runs__[at + 1]; left > 0; left -= 1) numbers.push(value.__runs__[at]);
    }
    return numbers;
  }
  if (!value.__texts__) return value;
  const texts = Object.entries(value.__of__).map(([name, [text, microbatch]]) => [
    name,
    microbatch === undefined ? value.__texts__[text] : value.__texts__[text].replace('#', microbatch),
  ]);
  return Object.fromEntries(texts);
};
const report = JSON.parse(document.getElementById('data').textContent, unpacked);
const twoPlans = report.plans.length > 1;
