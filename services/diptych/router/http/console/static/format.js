// Numbers as people read them. Everything that is not known is a dash.

export const DASH = "\u2013";

const ROUND = 0.9995; // what would round up to a thousand has the next unit

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 1234567 -> "1.23 M"; small numbers keep what is significant. */
export function number(value, digits = 3) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= (name === "k" ? unit : unit * ROUND)) return `${significant(value / (name === "k" ? 1e3 : unit), digits)} ${name}`;
  }
  return Number.isInteger(value) ? value.toLocaleString("en") : significant(value, digits);
}

function significant(value, digits) {
  if (value === 0) return "0";
  const whole = Math.floor(Math.log10(Math.abs(value))) + 1;
  return value.toFixed(Math.max(0, Math.min(3, digits - Math.max(1, whole))));
}

/** Seconds -> "0 s", "430 us", "12.3 ms", "1.4 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Math.round(seconds * 1e6)} \u00b5s`;
  if (size < 0.9995) return `${significant(seconds * 1e3, 3)} ms`;
  if (size < 59.95) return `${significant(seconds, 3)} s`;
  const steps = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let rest = Math.round(size);
  const first = steps.findIndex(([, unit]) => rest >= unit);
  return steps.slice(first, first + 2).map(([name, unit]) => {
    const count = Math.floor(rest / unit);
    rest -= count * unit;
    return count ? `${count} ${name}` : "";
  }).filter(Boolean).join(" ");
}

/** Bytes -> "512 B", "1.5 KB", "2.25 GB" (of 1000). */
export function bytes(value) {
  if (!known(value)) return DASH;
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"]]) {
    if (Math.abs(value) >= unit * ROUND) return `${significant(value / unit, 3)} ${name}`;
  }
  return `${Math.round(value)} B`;
}

/** Bytes a second. */
export const speed = (value) => (known(value) ? `${bytes(value)}/s` : DASH);

/** A share of 0 to 1 -> "63 %". */
export function share(value) {
  if (!known(value)) return DASH;
  const percent = value * 100;
  return `${percent > 0 && percent < 1 ? percent.toFixed(1) : Math.round(percent)} %`;
}

/** "1 worker", "4 workers". */
export const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

/** A moment in seconds since 1970 -> "14:03:09", in the reader's time zone. */
export function clock(unixS) {
  return known(unixS) ? new Date(unixS * 1000).toLocaleTimeString("en-GB") : DASH;
}

/** The first digits of an instance: enough to tell it from its neighbours. */
export const shortId = (instance) => (instance === "router" ? instance : instance.slice(0, 6));

/** What a worker is called: its pod where it has one, else the first digits of its instance. */
export function workerName(instance, workers) {
  const pod = workers?.[instance]?.pod;
  return pod ? pod : shortId(instance);
}
