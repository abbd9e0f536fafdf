// The steps of the last five minutes, in typed arrays: a log has room for 64 workers of 20 steps a second.

export const WINDOW_MS = 300_000;
const MAX_STEPS = 32_768; // of a worker; the oldest go first
const MAX_ARROWS = 20_000;

/** The steps of one worker, the oldest first: those with `first <= index < end`. */
export class WorkerSteps {
  constructor() {
    this.first = 0;
    this.end = 0;
    this.allocate(512);
  }

  allocate(capacity) {
    const grown = {
      begunMs: new Float64Array(capacity), ms: new Float32Array(capacity),
      prompt: new Uint32Array(capacity), output: new Uint32Array(capacity), requests: new Uint16Array(capacity),
    };
    for (const [name, array] of Object.entries(grown)) {
      if (this[name]) array.set(this[name].subarray(this.first, this.end));
      this[name] = array;
    }
    this.end -= this.first;
    this.first = 0;
  }

  get newestMs() {
    return this.end > this.first ? this.begunMs[this.end - 1] : -Infinity;
  }

  push([begunMs, ms, prompt, output, requests]) {
    if (this.end === this.begunMs.length) {
      const kept = this.end - this.first;
      this.allocate(kept > this.begunMs.length / 2 ? this.begunMs.length * 2 : this.begunMs.length);
    }
    const at = this.end++;
    this.begunMs[at] = begunMs;
    this.ms[at] = ms;
    this.prompt[at] = prompt;
    this.output[at] = output;
    this.requests[at] = requests;
    if (this.end - this.first > MAX_STEPS) this.first++;
  }

  forget(beforeMs) {
    while (this.first < this.end && this.begunMs[this.first] + this.ms[this.first] < beforeMs) this.first++;
  }

  /** The first index whose step ends after a moment. Steps of a worker do not overlap. */
  indexAt(ms) {
    let low = this.first;
    let high = this.end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begunMs[middle] + this.ms[middle] < ms) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The index of the step that began at a moment; -1: it is forgotten. */
  indexOf(begunMs) {
    let index = this.indexAt(begunMs);
    while (index < this.end && this.begunMs[index] < begunMs) index++;
    return index < this.end && this.begunMs[index] === begunMs ? index : -1;
  }
}

/** The server's time as the page sees it: it runs on while no steps come, and never jumps back by more than they do. */
class HeadClock {
  constructor() {
    this.offsetMs = null; // from our clock to the end of the newest step
  }

  hear(headMs, nowMs = performance.now()) {
    const offset = headMs - nowMs;
    const isFar = this.offsetMs === null || Math.abs(offset - this.offsetMs) > 5000;
    this.offsetMs = isFar ? offset : this.offsetMs + (offset - this.offsetMs) * (offset > this.offsetMs ? 0.5 : 0.02);
  }

  now(nowMs = performance.now()) {
    return (this.offsetMs ?? 0) + nowMs;
  }
}

export class StepLog {
  constructor() {
    this.clock = new HeadClock();
    this.workers = new Map(); // WorkerSteps by instance
    this.arrows = []; // {room, from, fromMs, to, toMs}: hand-offs whose both ends are known
    this.open = new Map(); // by room: one end of a hand-off
    this.newestMs = 0; // begin of the newest step
    this.headMs = 0; // end of the newest step
    this.version = 0;
  }

  /** Add `Steps`; those that are known already are passed over. */
  add(data) {
    const known = this.arrows.length;
    for (const [instance, rows] of Object.entries(data.workers)) {
      if (!this.workers.has(instance)) this.workers.set(instance, new WorkerSteps());
      const steps = this.workers.get(instance);
      for (const row of rows) if (row[0] > steps.newestMs) this.push(instance, steps, row);
    }
    this.sortArrows(known);
    if (this.headMs) this.clock.hear(this.headMs);
    this.forget(this.headMs - WINDOW_MS);
    this.version++;
  }

  push(instance, steps, row) {
    steps.push(row);
    const [begunMs, ms, , , , handed, joined] = row;
    this.newestMs = Math.max(this.newestMs, begunMs);
    this.headMs = Math.max(this.headMs, begunMs + ms);
    for (const room of handed) this.meet(room, { from: instance, fromMs: begunMs + ms });
    for (const room of joined) this.meet(room, { to: instance, toMs: begunMs });
  }

  meet(room, end) {
    const both = { room, ...this.open.get(room), ...end };
    if (both.from && both.to) {
      this.open.delete(room);
      this.arrows.push(both);
    } else this.open.set(room, both);
  }

  /** By when they joined: a batch tells of one worker after the other. */
  sortArrows(known) {
    if (this.arrows.length > known + 1 || this.arrows[known]?.toMs < this.arrows[known - 1]?.toMs) this.arrows.sort((a, b) => a.toMs - b.toMs);
  }

  /** What a worker did in the last `ms`: {num, busyMs, prompt, output, longestMs}. */
  summary(instance, ms) {
    const sum = { num: 0, busyMs: 0, prompt: 0, output: 0, longestMs: 0 };
    const steps = this.workers.get(instance);
    for (let index = steps ? steps.indexAt(this.headMs - ms) : 0; steps && index < steps.end; index++) {
      sum.num += 1;
      sum.busyMs += Math.min(steps.ms[index], steps.begunMs[index] + steps.ms[index] - (this.headMs - ms));
      sum.prompt += steps.prompt[index];
      sum.output += steps.output[index];
      sum.longestMs = Math.max(sum.longestMs, steps.ms[index]);
    }
    return sum;
  }

  forget(beforeMs) {
    for (const [instance, steps] of this.workers) {
      steps.forget(beforeMs);
      if (steps.first === steps.end) this.workers.delete(instance);
    }
    const old = this.arrows.findIndex((arrow) => arrow.toMs >= beforeMs);
    if (old > 0) this.arrows.splice(0, old);
    if (this.arrows.length > MAX_ARROWS) this.arrows.splice(0, this.arrows.length - MAX_ARROWS);
    for (const [room, end] of this.open) {
      if ((end.fromMs ?? end.toMs) >= beforeMs && this.open.size < MAX_ARROWS) break;
      this.open.delete(room);
    }
  }
}
