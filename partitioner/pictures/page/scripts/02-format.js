// Numbers as people read them: three digits and a unit. Bytes by 1024, everything else by 1000.

function scaled(value, base, units) {
  let index = 0;
  let rest = Math.abs(value);
  while (rest >= base * 0.9995 && index < units.length - 1) {
    rest /= base;
    index += 1;
  }
  return `${value < 0 ? '−' : ''}${threeDigits(rest)} ${units[index]}`;
}

function threeDigits(value) {
  if (value === 0) return '0';
  if (value >= 999.5) return String(Math.round(value));
  if (value >= 99.95) return value.toFixed(0);
  return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function formatBytes(value) {
  if (value < 1024) return `${Math.round(value)} B`;
  return scaled(value, 1024, ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB']);
}

/** A cost in the unit of its file. */
function formatCost(value, unit) {
  return `${Number(value.toPrecision(4))} ${unit}`;
}

function formatBandwidth(value) {
  return scaled(value, 1000, ['B/s', 'kB/s', 'MB/s', 'GB/s', 'TB/s', 'PB/s']);
}

function formatFlops(value) {
  return scaled(value, 1000, ['FLOP', 'kFLOP', 'MFLOP', 'GFLOP', 'TFLOP', 'PFLOP', 'EFLOP', 'ZFLOP']);
}

function formatSeconds(value) {
  if (value === 0) return '0 s';
  const size = Math.abs(value);
  if (size >= 0.9995) return `${value < 0 ? '−' : ''}${threeDigits(size)} s`;
  return scaled(value * 1e9, 1000, ['ns', 'µs', 'ms', 's']);
}

function formatShare(value) {
  const percent = value * 100;
  return `${percent > 0 && percent < 0.05 ? '< 0.1' : percent.toFixed(percent < 9.95 ? 1 : 0)} %`;
}

const counts = new Intl.NumberFormat('en'); // kept: making one takes longer than using it a hundred times

function formatCount(value) {
  return counts.format(value);
}

function plural(count, one, many) {
  return `${formatCount(count)} ${count === 1 ? one : many || one + 's'}`;
}

/** Round numbers between 0 and `most`, about `wanted` of them; `base` 1024 for bytes. */
function ticks(most, wanted, base = 1000) {
  if (!(most > 0)) return [0];
  const unit = base === 1024 ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const rough = most / unit / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let value = 0; value <= (most / unit) * 1.0001; value += step) found.push(value * unit);
  return found;
}
