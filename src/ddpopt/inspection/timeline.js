"use strict";

// The card of timelines: when sections computed and buckets communicated, measured and predicted.
// page.js, which follows in the same script, has what all cards share.

const TIME = { left: 112, right: 16, title: 30, compute: 26, gap: 8, after: 22, axis: 24 };
let drawTimeline = () => {};

function timelineCard() {
  const panels = KINDS.map(panelOf).filter(Boolean);
  if (!panels.length)
    return card("timeline", "Timeline", "Neither predicted nor measured times are known.");
  const figure = make("div.timeline");
  let width = 0;
  drawTimeline = () => {
    if (figure.clientWidth === width || !figure.clientWidth) return;
    width = figure.clientWidth;
    figure.replaceChildren(timeline(panels, width));
    showSelection();
  };
  const basis = content.predicted?.basis ? `Prediction (${content.predicted.basis}).` : "";
  const lead = `Time in ${UNIT.name} from the end of forward. ${basis}`;
  return card("timeline", "Timeline", lead, figure, legend(panels));
}

/** What one panel shows, or null where nothing is known: `kind` is measured or predicted. */
function panelOf(kind) {
  const summary = content[kind];
  const reduced = content.buckets.filter((bucket) => bucket[kind]);
  if (!summary && !reduced.length) return null;
  const finished = reduced.length
    ? Math.max(...reduced.map((bucket) => bucket[kind].finished_s ?? 0))
    : summary.backward_s;
  const exposed = summary?.exposed_s;
  const steps = summary?.num_steps;
  const times = {
    backward: summary?.backward_s,
    "all allreduces": summary?.communication_s,
    "waiting for them": exposed,
  };
  const known = Object.entries(times).filter(([, time]) => isGiven(time));
  const measured = steps ? (steps === 1 ? "one step" : `median of ${steps} steps`) : "";
  const notes = known.map(([name, time]) => `${name} ${duration(time)}`);
  return {
    kind,
    title: capital(kind),
    note: join([measured, ...notes]),
    // What to show of it instead where there is less room, as on a phone.
    shorterNotes: [join(notes), join([notes[0], notes[2]]), notes[0] ?? ""],
    work: workOf(summary, exposed ? finished - exposed : summary?.backward_s),
    rows: pack(reduced.map((bucket) => ({ bucket, times: bucket[kind] }))),
    end: summary ? Math.max(summary.backward_s, finished) : null,
    exposed: exposed ? { start: finished - exposed, stop: finished } : null,
  };
}

/** The bars of the computation lane: sections where they were measured, else one up to `stop`. */
function workOf(summary, stop) {
  if (!summary) return [];
  const sections = (summary.sections ?? []).filter((section) => section.kind === "backward");
  if (!sections.length) {
    const tip = ["Computation of backward", `until ${duration(stop)}`];
    return [{ start: 0, stop, entry: null, labels: ["backward"], tip }];
  }
  const isOneGraph = new Set(sections.map((section) => section.graph)).size === 1;
  return sections.map(({ graph, section, start_s: start, stop_s: stop }) => ({
    start,
    stop,
    entry: entries.get(keyOf(graph, section)) ?? null,
    labels: [isOneGraph ? `section ${section}` : `${graph} section ${section}`, `${section}`],
    tip: [
      `Section ${section} of graph ${graph}`,
      `${duration(start)} to ${duration(stop)}: ${duration(stop - start)}`,
    ],
  }));
}

/** Put each bucket into the first row that is free when it is ready. */
function pack(reduced) {
  const rows = [];
  for (const item of reduced) {
    let row = rows.find((each) => each.until <= item.times.ready_s);
    if (!row) rows.push((row = { until: -Infinity, items: [] }));
    row.items.push(item);
    row.until = item.times.finished_s ?? item.times.launched_s;
  }
  return rows;
}

function timeline(panels, width) {
  const times = panels.flatMap((panel) => [
    panel.end ?? 0,
    ...panel.work.flatMap((bar) => [bar.start, bar.stop]),
    ...panel.rows.flatMap((row) => [row.until, ...row.items.map((item) => item.times.ready_s)]),
  ]);
  const first = Math.min(0, ...times);
  const last = Math.max(...times, first + 1e-9);
  const scale = (width - TIME.left - TIME.right) / (last - first);
  const x = (seconds) => TIME.left + (seconds - first) * scale;
  let bottom = 0;
  const groups = panels.map((panel) => {
    const group = drawPanel(panel, x, bottom, width - TIME.right);
    bottom += TIME.title + TIME.compute + TIME.gap + laneHeight(panel) + TIME.after;
    return group;
  });
  const lines = ticks(first, last, width).map((tick) => drawTick(tick, x(tick), bottom));
  const label = panels.map((panel) => `${panel.title}: ${panel.note}`).join(". ");
  const attributes = { height: bottom + TIME.axis, role: "group", "aria-label": label };
  return make("svg", attributes, lines, groups);
}

const rowHeight = (panel) =>
  panel.rows.length <= 8 ? 18 : panel.rows.length <= 20 ? 13 : panel.rows.length <= 60 ? 7 : 4;
const laneHeight = (panel) => Math.max(1, panel.rows.length) * rowHeight(panel) + 4;

/** Round times for the axis, about 90 pixels apart. */
function ticks(first, last, width) {
  const least = ((last - first) * UNIT.factor * 90) / Math.max(200, width - TIME.left);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = (([1, 2, 5].find((each) => each * power >= least) ?? 10) * power) / UNIT.factor;
  const from = Math.ceil(first / step);
  return Array.from({ length: Math.floor(last / step) - from + 1 }, (_, i) => (from + i) * step);
}

function drawTick(seconds, x, bottom) {
  const text = `${+(seconds * UNIT.factor).toPrecision(6)}`;
  return make(
    "g.tick",
    make("line", { x1: x, x2: x, y1: TIME.title, y2: bottom }),
    make("text", { x, y: bottom + 16, "text-anchor": "middle" }, text),
  );
}

function drawPanel(panel, x, top, far) {
  const compute = top + TIME.title;
  const lane = compute + TIME.compute + TIME.gap;
  const height = laneHeight(panel);
  const bottom = lane + height;
  const bars = panel.work.map((bar, i) => drawWork(bar, i, x, compute));
  const marks = panel.rows.flatMap((row, i) => {
    const place = { top: lane + 2 + i * rowHeight(panel), height: rowHeight(panel) };
    return row.items.map((item) => drawBucket(panel.kind, item, x, place));
  });
  marks.sort((a, b) => a.dataset.bucket - b.dataset.bucket);
  const size = { x: TIME.left, width: far - TIME.left };
  const right = panel.end === null ? 0 : x(panel.end);
  const note = firstThatFits([panel.note, ...panel.shorterNotes], size.width);
  const node = make(
    "g.panel",
    make("rect.lane", { ...size, y: compute, height: TIME.compute }),
    make("rect.lane", { ...size, y: lane, height }),
    make("text.panel-title", { x: 0, y: top + 19 }, panel.title),
    make("text.label", { x: TIME.left, y: top + 19 }, note ?? ""),
    make("text.label", { x: 0, y: compute + 17 }, "computation"),
    make("text.label", { x: 0, y: lane + 15 }, "communication"),
    drawExposed(panel, x, compute, bottom),
    panel.end !== null && make("line.end", { x1: right, x2: right, y1: compute, y2: bottom }),
    oneTabStop(`${panel.kind} computation`, bars),
    oneTabStop(`${panel.kind} communication`, marks),
  );
  node.classList.add(panel.kind);
  return node;
}

/** The first text that is drawn within a width, at so many pixels a character; or undefined. */
const firstThatFits = (texts, width, perCharacter = 6.8) =>
  texts.find((text) => text.length * perCharacter + 8 < width);

function drawExposed({ exposed }, x, top, bottom) {
  if (!exposed) return null;
  const [from, to] = [x(exposed.start), x(exposed.stop)];
  const time = duration(exposed.stop - exposed.start);
  const text = firstThatFits([`waiting ${time}`, time], to - from, 7.6);
  return make(
    "g.mark.still",
    make("title", `Exposed communication\n${time} in which nothing is computed`),
    make("rect.exposed", { x: from, y: top, width: to - from, height: bottom - top }),
    text && make("text.exposed-label", { x: (from + to) / 2, y: top + 17 }, text),
  );
}

function drawWork({ start, stop, entry, labels, tip }, i, x, top) {
  const from = x(start);
  const width = Math.max(1, x(stop) - from);
  const label = firstThatFits(labels, width);
  const place = { x: from, width };
  return make(
    entry ? "g.mark" : "g.mark.still",
    entry ? { "data-section": entry.key, ...pressable(tip.join(", "), { entry }) } : {},
    make("title", [...tip, ...(entry ? [sectionText(entry)] : [])].join("\n")),
    make(i % 2 ? "rect.work.other" : "rect.work", {
      ...place,
      y: top + 2,
      height: TIME.compute - 4,
      rx: 2,
    }),
    make("rect.hit", { ...place, y: top, height: TIME.compute }),
    label && make("text", { x: from + width / 2, y: top + 17 }, label),
  );
}

function drawBucket(kind, { bucket, times }, x, { top, height }) {
  const isOpen = times.finished_s === null;
  const launched = x(times.launched_s);
  const ready = Math.min(x(times.ready_s), launched);
  const finished = isOpen ? launched + 10 : Math.max(x(times.finished_s), launched + 1.5);
  const width = finished - launched;
  const middle = top + height / 2;
  const thick = height - (height > 6 ? 3 : 1);
  const radius = Math.min(3.5, height / 2);
  const text = timesText(kind, times);
  const title = `Bucket ${bucket.index}: ${bytes(bucket.num_bytes)}`;
  const hasLabel = height >= 13 && `${bucket.index}`.length * 7 + 8 < width;
  return make(
    "g.mark",
    { "data-bucket": bucket.index, ...pressable(`bucket ${bucket.index}, ${text}`, { bucket }) },
    make("title", [title, text, waits(times), `completed by ${bucket.completed_by}`].join("\n")),
    make("rect.hit", { x: ready - radius, y: top, width: finished - ready + radius, height }),
    launched - ready > 1 &&
      make("line.waiting", { x1: ready, x2: launched, y1: middle, y2: middle }),
    make(isOpen ? "rect.run.open" : "rect.run", {
      x: launched,
      y: middle - thick / 2,
      width,
      height: thick,
      rx: Math.min(2, thick / 2),
    }),
    make("circle.ready", { cx: ready, cy: middle, r: radius }),
    hasLabel && make("text", { x: launched + width / 2, y: middle + 4 }, `${bucket.index}`),
  );
}

function waits({ ready_s: ready, launched_s: launched, finished_s: finished }) {
  const running = finished === null ? "" : `, runs ${duration(finished - launched)}`;
  return `waits ${duration(Math.max(0, launched - ready))}${running}`;
}

function legend(panels) {
  const items = {
    "i.work": "computation of backward",
    "i.ready": "bucket ready",
    "i.waiting": "waits for its launch",
    "i.run": "allreduce runs",
    ...(panels.some((panel) => panel.exposed) && {
      "i.exposed": "backward waits for communication: nothing is left to be computed",
    }),
  };
  const shown = Object.entries(items).map(([what, text]) => make("span", make(what), text));
  return make("div.legend", shown);
}

/** The attributes of a mark that selects something. */
const pressable = (label, target) => ({
  tabindex: "0",
  role: "button",
  "aria-pressed": "false",
  "aria-label": label,
  click: () => select(target),
});

/** A group of marks with one tab stop, between which the arrow keys move. */
function oneTabStop(label, marks) {
  const stops = marks.filter((mark) => mark.hasAttribute("tabindex"));
  stops.slice(1).forEach((mark) => mark.setAttribute("tabindex", "-1"));
  const keydown = (event) => {
    const at = stops.indexOf(event.target);
    const goals = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1 };
    const next = stops[{ ...goals, Home: 0, End: stops.length - 1 }[event.key]];
    if (event.key === "Enter" || event.key === " ") event.target.dispatchEvent(new Event("click"));
    else if (!next) return;
    event.preventDefault();
    if (!next) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  };
  return make("g", { role: "group", "aria-label": label, keydown }, marks);
}
