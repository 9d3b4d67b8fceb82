"use strict";

// ---- Foundations -------------------------------------------------------------------------------
// Elements are made by `make` and `draw`, which put strings in as text. Nothing here parses markup,
// so a name that looks like markup is shown as it is.

const startedAt = performance.now();
const SVG = "http://www.w3.org/2000/svg";
const page = document.documentElement;

// What went wrong, and how long things took, for whoever looks at the document (tests do).
addEventListener("error", (event) => {
  page.dataset.error = event.message;
});
document.addEventListener("securitypolicyviolation", (event) => {
  page.dataset.error = `blocked by ${event.violatedDirective}`;
});

function timed(name, action) {
  const before = performance.now();
  action();
  page.dataset[name] = (performance.now() - before).toFixed(1);
}

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") {
      node.addEventListener(name, value);
    } else if (value !== null && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null));
  return node;
}

/** `text` with what was searched for marked. */
function marked(text, query) {
  if (!query) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let done = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, done)) {
    parts.push(text.slice(done, at), make("mark", {}, text.slice(at, at + query.length)));
    done = at + query.length;
  }
  return [...parts, text.slice(done)];
}

// ---- Words and numbers -------------------------------------------------------------------------

const content = JSON.parse(document.getElementById("explanation").textContent);
const KINDS = ["measured", "predicted"];
const UNIT = unitFor(longestTime());

function longestTime() {
  const buckets = content.buckets.flatMap((bucket) => KINDS.map((kind) => bucket[kind]));
  const times = [...KINDS.map((kind) => content[kind]), ...buckets];
  return Math.max(
    0,
    ...times.map((time) => time?.backward_s ?? time?.finished_s ?? time?.launched_s ?? 0),
  );
}

function unitFor(seconds) {
  if (seconds >= 10) return { name: "s", factor: 1 };
  return seconds < 1e-3 ? { name: "µs", factor: 1e6 } : { name: "ms", factor: 1e3 };
}

/** A time as a number in the unit of this page, with three digits. */
function number(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const value = seconds * UNIT.factor;
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2);
}

const duration = (seconds) => `${number(seconds)} ${UNIT.name}`;

function bytes(size) {
  if (size >= 1024 ** 2) return `${(size / 1024 ** 2).toFixed(2)} MiB`;
  return size >= 1024 ? `${(size / 1024).toFixed(1)} KiB` : `${size} B`;
}

const count = (total, noun) =>
  `${total.toLocaleString("en")} ${noun}${total === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const join = (parts) => parts.filter(Boolean).join(" · ");
const sentences = (parts) => parts.filter(Boolean).join(" ");
const shorten = (names) =>
  names.length > 6 ? [...names.slice(0, 6), `and ${names.length - 6} more`] : names;

// ---- What belongs to what ----------------------------------------------------------------------
// An entry is a section of a graph, with the buckets that it completes. Where a bucket's gradients
// come from several graphs, each has an entry that completes its part; the last one stands last.

const buckets = new Map(content.buckets.map((bucket) => [bucket.index, bucket]));
const completing = new Map(content.buckets.map((bucket) => [bucket.index, []]));
const entries = new Map();
for (const graph of content.graphs) {
  for (const section of graph.sections) {
    const key = keyOf(graph.name, section.index);
    const completed = section.completes.filter((index) => buckets.has(index));
    const entry = { key, graph, section, completed, matches: null, haystacks: null, view: null };
    entries.set(key, entry);
    for (const index of completed) completing.get(index).push(entry);
  }
}
for (const bucket of content.buckets) putLast(bucket, lastOf(bucket));

function keyOf(graph, index) {
  return `${graph} section ${index}`;
}

/** A graph that is compiled whole completes buckets in its only section. */
function lastOf(bucket) {
  return entries.get(bucket.completed_by) ?? entries.get(keyOf(bucket.completed_by, 0));
}

function putLast(bucket, last) {
  if (!last) return;
  if (!last.completed.includes(bucket.index)) last.completed.push(bucket.index);
  const others = completing.get(bucket.index).filter((entry) => entry !== last);
  completing.set(bucket.index, [...others, last]);
}

const parametersOf = (bucket) => (bucket.actual.length ? bucket.actual : bucket.planned);
const numbersOf = (indices, noun) =>
  indices.length ? `${noun}${indices.length > 1 ? "s" : ""} ${indices.join(", ")}` : "";

function timesText(kind, times) {
  if (!times) return "";
  const finish =
    times.finished_s === null ? "finish not recorded" : `finished ${duration(times.finished_s)}`;
  const start = `ready ${duration(times.ready_s)}, launched ${duration(times.launched_s)}`;
  return `${kind}: ${start}, ${finish}`;
}

/** A bucket's gather behind forward, where updates are sharded; times there are below 0. */
function gatherOf(kind, bucket) {
  const gather = bucket[`${kind}_gather`];
  if (!gather) return null;
  const read = gather.wanted_s ?? gather.ready_s;
  const had = gather.had_s ?? Math.max(read, gather.finished_s);
  return { bucket, times: { ...gather, ready_s: gather.launched_s }, read, had };
}

function gatherText(kind, { times, read, had }) {
  const span = `launched ${duration(times.launched_s)}, finished ${duration(times.finished_s)}`;
  return `${kind} gather: ${span}, read ${duration(read)}, waits ${duration(had - read)}`;
}

// ---- Selection ---------------------------------------------------------------------------------
// One bucket or one section. Whatever shows a bucket or a section carries `data-bucket` or
// `data-section`; a line carries both.

let selected = null; // { bucket } or { entry }
const chosen = { text: make("p"), buttons: make("div", { class: "buttons" }) };
chosen.bar = make(
  "aside",
  { class: "chosen", hidden: true, "aria-label": "selection" },
  make("div", {}, chosen.text, chosen.buttons),
);

function select(next) {
  const isSame =
    next && selected && next.bucket === selected.bucket && next.entry === selected.entry;
  selected = isSame ? null : next;
  showSelection();
  writeFragment();
}

function showSelection() {
  const sections = new Set();
  const indices = new Set();
  if (selected?.bucket) {
    indices.add(`${selected.bucket.index}`);
    for (const entry of completing.get(selected.bucket.index)) sections.add(entry.key);
  } else if (selected) {
    sections.add(selected.entry.key);
    for (const index of selected.entry.completed) indices.add(`${index}`);
  }
  for (const node of document.querySelectorAll("[data-bucket], [data-section]")) {
    const { bucket, section } = node.dataset;
    const isSelected =
      (bucket === undefined || indices.has(bucket)) &&
      (section === undefined || sections.has(section));
    node.classList.toggle("selected", isSelected);
    if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", isSelected);
  }
  page.classList.toggle("has-selection", selected !== null);
  showChosen();
}

function showChosen() {
  chosen.bar.hidden = selected === null;
  if (!selected) return;
  const isBucket = Boolean(selected.bucket);
  chosen.text.replaceChildren(
    make("strong", {}, isBucket ? `Bucket ${selected.bucket.index}` : sectionTitle(selected.entry)),
    ` · ${isBucket ? bucketText(selected.bucket) : sectionText(selected.entry)}`,
  );
  const entry = isBucket ? completing.get(selected.bucket.index).at(-1) : selected.entry;
  chosen.buttons.replaceChildren(
    ...(isBucket
      ? [
          action("In the table", () =>
            document
              .getElementById(`bucket-${selected.bucket.index}`)
              .scrollIntoView({ block: "center" }),
          ),
        ]
      : []),
    ...(entry ? [action("Nodes of the section", () => reveal(entry))] : []),
    action("Clear", () => select(null)),
  );
}

const action = (text, click) => make("button", { class: "button", type: "button", click }, text);
const sectionTitle = (entry) => `Section ${entry.section.index} of graph ${entry.graph.name}`;

function bucketText(bucket) {
  return join([
    bytes(bucket.num_bytes),
    count(parametersOf(bucket).length, "parameter"),
    `completed by ${bucket.completed_by}`,
    ...KINDS.map((kind) => timesText(kind, bucket[kind])),
  ]);
}

function sectionText(entry) {
  const { completed } = entry;
  return join([
    count(entry.section.num_nodes, "node"),
    count(entry.section.parameters.length, "parameter"),
    completed.length ? `completes ${numbersOf(completed, "bucket")}` : "completes no bucket",
  ]);
}

// ---- Header ------------------------------------------------------------------------------------

// Fallbacks by which overlap is lost, rather than expected ones.
const OVERLAP_LOST = new Set(["NO_LEGAL_CUT", "SECTION_FAILED", "NOT_PROVEN", "SPLIT_FAILED", "TORCH_DRIFT"]);

function header() {
  const versions = Object.entries(content.versions).map(([name, version]) => `${name} ${version}`);
  return make(
    "header",
    {},
    make(
      "div",
      { class: "title" },
      make("h1", {}, content.model),
      make("span", { class: "quiet" }, join(versions)),
    ),
    make("dl", { class: "facts" }, facts()),
    tuning(),
    fallbacks(),
    hints(),
  );
}

// Sentences, and below them the tables, which are the indented lines and those between them.
function tuning() {
  const isTable = (line) => /^( {2}|$)/.test(line);
  const lines = content.tuning.split("\n");
  const tables = lines.filter(isTable).join("\n").replace(/^\n+|\n+$/g, "");
  return [
    lines.filter((line) => !isTable(line)).map((line) => make("p", {}, capital(line))),
    tables
      ? make(
          "details",
          { class: "tables" },
          make("summary", {}, "What this was decided from"),
          make("pre", { class: "mono" }, tables),
        )
      : null,
  ];
}

function facts() {
  const { predicted, measured } = content;
  const split = content.graphs.filter((graph) => !graph.fallback);
  const total = content.graphs.length;
  const sections = sum(split.map((graph) => graph.sections.length));
  const exposed = predicted || measured?.exposed_s != null;
  return [
    fact(
      "DDP buckets",
      `${buckets.size}`,
      bytes(sum(content.buckets.map((bucket) => bucket.num_bytes))),
    ),
    fact(
      "sections",
      `${sections}`,
      `in ${split.length < total ? `${split.length} of ` : ""}${count(total, "graph")}`,
    ),
    predicted || measured ? comparedFact("backward", "backward_s") : null,
    exposed ? comparedFact("exposed communication", "exposed_s", "exposed") : null,
    predicted
      ? fact(
          "bound of an iteration",
          duration(predicted.bound_s),
          `predicted iteration ${duration(predicted.iteration_s)}`,
        )
      : null,
  ].filter(Boolean);
}

/** The measured time first, where there is one. */
function comparedFact(name, field, className = "") {
  const known = KINDS.filter((kind) => content[kind]?.[field] != null);
  const [first, second] = known.map((kind) => duration(content[kind][field]));
  return fact(name, first, second ? `measured; predicted ${second}` : known[0], className);
}

function fact(name, value, more, className = "") {
  return make(
    "div",
    {},
    make("dt", {}, name),
    make("dd", { class: className }, value),
    make("dd", { class: "small" }, more),
  );
}

/** One callout for each reason, with all graphs that have it. */
function fallbacks() {
  const reasons = new Map();
  for (const graph of content.graphs) {
    for (const kind of ["fallback", "backward_fallback"]) {
      if (!graph[kind]) continue;
      const key = JSON.stringify([kind, graph[kind]]);
      if (!reasons.has(key)) reasons.set(key, { kind, reason: graph[kind], names: [] });
      reasons.get(key).names.push(graph.name);
    }
  }
  const isAlert = ({ kind, reason }) => kind === "backward_fallback" || OVERLAP_LOST.has(reason.name);
  const ordered = [...reasons.values()].sort((a, b) => isAlert(b) - isAlert(a));
  return ordered.map((each) => fallback(each, isAlert(each)));
}

function fallback({ kind, reason, names }, isAlert) {
  const verb = names.length === 1 ? "is" : "are";
  const graphs = `${capital(numbersOf(shorten(names), "graph"))} ${verb}`;
  const [cause, ...remedy] = reason.text.replace(/\.$/, "").split("; ");
  return make(
    "section",
    { class: isAlert ? "callout alert" : "callout", "data-reason": reason.name },
    make(
      "h3",
      {},
      `${graphs} ${kind === "fallback" ? "compiled whole" : "cut in forward, not in backward"}`,
    ),
    make("p", {}, `${capital(cause)}.`),
    remedy.length ? make("p", {}, make("strong", {}, `${capital(remedy.join("; "))}.`)) : null,
    reason.detail ? make("pre", {}, make("code", {}, reason.detail)) : null,
  );
}

function hints() {
  if (!content.hints.length) return null;
  const sentences = content.hints.map((hint) => make("li", {}, hint));
  return make(
    "section",
    { class: "callout" },
    make("h3", {}, "What is missing here"),
    make("ul", {}, sentences),
  );
}

// ---- Timelines ---------------------------------------------------------------------------------

const TIME = { left: 112, right: 16, title: 30, compute: 26, gap: 8, after: 22, axis: 24 };

function timelineCard() {
  const panels = KINDS.map(panelOf).filter(Boolean);
  const figure = make("div", { class: "timeline" });
  const basis = content.predicted?.basis ? `Prediction (${content.predicted.basis}).` : "";
  const lead = panels.length
    ? `Time in ${UNIT.name} from the end of forward. ${basis}`
    : "Neither predicted nor measured times are known.";
  if (panels.length) {
    let width = 0;
    const redraw = () => {
      if (figure.clientWidth === width || !figure.clientWidth) return;
      width = figure.clientWidth;
      figure.replaceChildren(timeline(panels, width));
      if (selected) showSelection();
    };
    new ResizeObserver(redraw).observe(figure);
    whenShown.push(redraw);
  }
  return card("timeline", "Timeline", lead, figure, panels.length ? legend(panels) : null);
}

/** What one panel shows, or null where nothing is known: `kind` is measured or predicted. */
function panelOf(kind) {
  const summary = content[kind];
  const reduced = content.buckets.filter((bucket) => bucket[kind]);
  const gathers = content.buckets.map((bucket) => gatherOf(kind, bucket)).filter(Boolean);
  if (!summary && !reduced.length) return null;
  const finished = reduced.length
    ? Math.max(...reduced.map((bucket) => bucket[kind].finished_s ?? 0))
    : summary.backward_s;
  const waited = sum(gathers.map(({ read, had }) => had - read));
  // A predicted exposure includes what forward waits for, a measured one does not.
  const exposed =
    summary?.exposed_s == null
      ? null
      : Math.max(0, summary.exposed_s - (kind === "predicted" ? waited : 0));
  const steps = summary?.num_steps;
  const times = { backward: summary?.backward_s, communication: summary?.communication_s, exposed };
  return {
    kind,
    title: capital(kind),
    note: join([
      steps ? (steps === 1 ? "one step" : `median of ${steps} steps`) : "",
      ...Object.entries(times).map(([name, time]) =>
        time == null ? "" : `${name} ${duration(time)}`,
      ),
      gathers.length
        ? `forward ${duration(summary.forward_s)} waits ${duration(waited)} for gathers`
        : "",
    ]),
    work: [
      ...(gathers.length ? [forwardOf(summary)] : []),
      ...workOf(summary, exposed ? finished - exposed : summary?.backward_s),
    ],
    rows: pack([
      ...gathers.reverse(),
      ...reduced.map((bucket) => ({ bucket, times: bucket[kind] })),
    ]),
    hasGathers: gathers.length > 0,
    end: summary ? Math.max(summary.backward_s, finished) : null,
    exposed: exposed ? { start: finished - exposed, stop: finished } : null,
  };
}

function forwardOf(summary) {
  return {
    start: -summary.forward_s,
    stop: 0,
    entry: null,
    labels: ["forward"],
    tip: ["Forward", `${duration(summary.forward_s)}, with what it waits for`],
  };
}

/** The bars of the computation lane: sections where they were measured, else one up to `stop`. */
function workOf(summary, stop) {
  if (!summary) return [];
  const sections = (summary.sections ?? []).filter((section) => section.kind === "backward");
  if (sections.length) {
    const isOneGraph = new Set(sections.map((section) => section.graph)).size === 1;
    return sections.map(({ graph, section, start_s: start, stop_s: stop }) => ({
      start,
      stop,
      entry: entries.get(keyOf(graph, section)) ?? null,
      labels: isOneGraph
        ? [`section ${section}`, `${section}`]
        : [`${graph} section ${section}`, `${section}`],
      tip: [
        `Section ${section} of graph ${graph}`,
        `${duration(start)} to ${duration(stop)}: ${duration(stop - start)}`,
      ],
    }));
  }
  return [
    {
      start: 0,
      stop,
      entry: null,
      labels: ["backward"],
      tip: ["Computation of backward", `until ${duration(stop)}`],
    },
  ];
}

/** Put each bucket into the first row that is free when it is ready. */
function pack(reduced) {
  const rows = [];
  for (const item of reduced) {
    const { ready_s: start, launched_s: launched, finished_s: finished } = item.times;
    const row =
      rows.find((each) => each.until <= start) ?? rows[rows.push({ until: -Infinity, items: [] }) - 1];
    row.items.push(item);
    row.until = finished ?? launched;
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
  let top = 0;
  const groups = panels.map((panel) => {
    const group = drawPanel(panel, x, top, width - TIME.right);
    top += heightOf(panel);
    return group;
  });
  const label = panels.map((panel) => `${panel.title}: ${panel.note}`).join(". ");
  return draw(
    "svg",
    { height: top + TIME.axis, role: "group", "aria-label": label },
    ticks(first, last, width).map((tick) => drawTick(tick, x(tick), top)),
    groups,
  );
}

const rowHeight = (panel) =>
  panel.rows.length <= 8 ? 18 : panel.rows.length <= 20 ? 13 : panel.rows.length <= 60 ? 7 : 4;
const laneHeight = (panel) => Math.max(1, panel.rows.length) * rowHeight(panel) + 4;
const heightOf = (panel) => TIME.title + TIME.compute + TIME.gap + laneHeight(panel) + TIME.after;

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
  return draw(
    "g",
    { class: "tick" },
    draw("line", { x1: x, x2: x, y1: TIME.title, y2: bottom }),
    draw("text", { x, y: bottom + 16, "text-anchor": "middle" }, text),
  );
}

function drawPanel(panel, x, top, far) {
  const compute = top + TIME.title;
  const lane = compute + TIME.compute + TIME.gap;
  const bottom = lane + laneHeight(panel);
  const height = rowHeight(panel);
  const bars = panel.work.map((bar, i) => drawWork(bar, i, x, compute));
  const marks = panel.rows.flatMap((row, i) =>
    row.items.map((item) => drawBucket(panel, item, x, lane + 2 + i * height, height)),
  );
  marks.sort((a, b) => a.dataset.bucket - b.dataset.bucket);
  rove(bars.filter((bar) => bar.hasAttribute("tabindex")));
  rove(marks);
  const right = panel.end === null ? null : x(panel.end);
  const lanes = [
    [compute, TIME.compute],
    [lane, laneHeight(panel)],
  ].map(([y, height]) =>
    draw("rect", { class: "lane", x: TIME.left, y, width: far - TIME.left, height }),
  );
  return draw(
    "g",
    { class: `panel ${panel.kind}` },
    lanes,
    draw("text", { x: 0, y: top + 19, class: "panel-title" }, panel.title),
    draw("text", { x: TIME.left, y: top + 19, class: "label" }, panel.note),
    draw("text", { x: 0, y: compute + 17, class: "label" }, "computation"),
    draw("text", { x: 0, y: lane + 15, class: "label" }, "communication"),
    drawExposed(panel, x, compute, bottom),
    right === null
      ? null
      : draw("line", { x1: right, x2: right, y1: compute, y2: bottom, class: "end" }),
    draw("g", { role: "group", "aria-label": `${panel.kind} computation` }, bars),
    draw("g", { role: "group", "aria-label": `${panel.kind} communication` }, marks),
  );
}

function drawExposed({ exposed }, x, top, bottom) {
  if (!exposed) return null;
  const [from, to] = [x(exposed.start), x(exposed.stop)];
  const time = duration(exposed.stop - exposed.start);
  const text = [`exposed ${time}`, time].find((each) => each.length * 7.6 + 8 < to - from);
  const area = draw(
    "g",
    { class: "mark still" },
    draw("rect", { class: "exposed", x: from, y: top, width: to - from, height: bottom - top }),
    text ? draw("text", { class: "exposed-label", x: (from + to) / 2, y: top + 17 }, text) : null,
  );
  tip(area, () => ["Exposed communication", `${time} in which nothing is computed`]);
  return area;
}

function drawWork(bar, i, x, top) {
  const from = x(bar.start);
  const width = Math.max(1, x(bar.stop) - from);
  const label = bar.labels.find((text) => text.length * 6.8 + 8 < width);
  const node = draw(
    "g",
    bar.entry
      ? { class: "mark", "data-section": bar.entry.key, ...pressable(bar.tip.join(", ")) }
      : { class: "mark still" },
    draw("rect", {
      class: i % 2 ? "work other" : "work",
      x: from,
      y: top + 2,
      width,
      height: TIME.compute - 4,
      rx: 2,
    }),
    draw("rect", { class: "hit", x: from, y: top, width, height: TIME.compute }),
    label ? draw("text", { x: from + width / 2, y: top + 17 }, label) : null,
  );
  tip(node, () => [...bar.tip, ...(bar.entry ? [sectionText(bar.entry)] : [])]);
  if (bar.entry) onPress(node, () => select({ entry: bar.entry }));
  return node;
}

function drawBucket({ kind }, item, x, top, height) {
  const { bucket, times } = item;
  const isGather = "read" in item;
  const middle = top + height / 2;
  const thick = height - (height > 6 ? 3 : 1);
  const launched = x(times.launched_s);
  const ready = Math.min(x(times.ready_s), launched);
  const isOpen = times.finished_s === null;
  const finished = isOpen ? launched + 10 : Math.max(x(times.finished_s), launched + 1.5);
  const label = `${bucket.index}`;
  const radius = Math.min(3.5, height / 2);
  const node = draw(
    "g",
    {
      class: "mark",
      "data-bucket": bucket.index,
      ...pressable(
        `bucket ${bucket.index}, ${isGather ? gatherText(kind, item) : timesText(kind, times)}`,
      ),
    },
    draw("rect", {
      class: "hit",
      x: ready - radius,
      y: top,
      width: finished - ready + radius,
      height,
    }),
    launched - ready > 1
      ? draw("line", { class: "waiting", x1: ready, x2: launched, y1: middle, y2: middle })
      : null,
    draw("rect", {
      class: isGather ? "run gather" : isOpen ? "run open" : "run",
      x: launched,
      y: middle - thick / 2,
      width: finished - launched,
      height: thick,
      rx: Math.min(2, thick / 2),
    }),
    isGather ? null : draw("circle", { class: "ready", cx: ready, cy: middle, r: radius }),
    height >= 13 && label.length * 7 + 8 < finished - launched
      ? draw("text", { x: (launched + finished) / 2, y: middle + 4 }, label)
      : null,
  );
  tip(node, () => (isGather ? gatherTip(kind, item) : bucketTip(kind, bucket, times)));
  onPress(node, () => select({ bucket }));
  return node;
}

function bucketTip(kind, bucket, times) {
  const running =
    times.finished_s === null ? "" : `, runs ${duration(times.finished_s - times.launched_s)}`;
  return [
    `Bucket ${bucket.index}: ${bytes(bucket.num_bytes)}`,
    timesText(kind, times),
    `waits ${duration(Math.max(0, times.launched_s - times.ready_s))}${running}`,
    `completed by ${bucket.completed_by}`,
  ];
}

function gatherTip(kind, item) {
  return [
    `Bucket ${item.bucket.index}: ${bytes(item.bucket.num_bytes)} of parameters`,
    gatherText(kind, item),
  ];
}

function legend(panels) {
  const hasGathers = panels.some((panel) => panel.hasGathers);
  const hasExposed = panels.some((panel) => panel.exposed);
  const items = [
    ["work", hasGathers ? "computation" : "computation of backward"],
    ["ready", "bucket ready"],
    ["waiting", "waits for its launch"],
    ["run", hasGathers ? "gradients are summed to shards" : "allreduce runs"],
    ...(hasGathers ? [["run gather", "updated parameters are gathered"]] : []),
    ...(hasExposed
      ? [["exposed", "exposed: communication while nothing is computed"]]
      : []),
  ];
  return make(
    "div",
    { class: "legend" },
    items.map(([name, text]) => make("span", {}, make("i", { class: name }), text)),
  );
}

const pressable = (label) => ({
  tabindex: "0",
  role: "button",
  "aria-pressed": "false",
  "aria-label": label,
});

function onPress(node, press) {
  node.addEventListener("click", press);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    press();
  });
}

/** One tab stop for many marks, between which the arrow keys move. */
function rove(nodes) {
  nodes.slice(1).forEach((node) => node.setAttribute("tabindex", "-1"));
  nodes.forEach((node, i) =>
    node.addEventListener("keydown", (event) => {
      const goals = {
        ArrowRight: i + 1,
        ArrowDown: i + 1,
        ArrowLeft: i - 1,
        ArrowUp: i - 1,
        Home: 0,
        End: nodes.length - 1,
      };
      const next = nodes[goals[event.key]];
      if (!next) return;
      event.preventDefault();
      node.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    }),
  );
}

const bubble = make("div", { class: "tip", role: "tooltip", hidden: true });

/** Show lines of text at the pointer, or at the node when it has the focus. */
function tip(node, lines) {
  const show = (left, top) => {
    const [first, ...others] = lines();
    bubble.replaceChildren(make("b", {}, first), ...others.map((line) => make("div", {}, line)));
    bubble.hidden = false;
    const box = bubble.getBoundingClientRect();
    bubble.style.left = `${Math.max(8, Math.min(left + 14, innerWidth - box.width - 8))}px`;
    const below = top + 18;
    const fits = below + box.height <= innerHeight;
    bubble.style.top = `${fits ? below : Math.max(8, top - box.height - 10)}px`;
  };
  const hide = () => {
    bubble.hidden = true;
  };
  node.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  node.addEventListener("pointerleave", hide);
  node.addEventListener("focus", () => {
    const box = node.getBoundingClientRect();
    if (node.matches(":focus-visible")) show(box.left, box.bottom - 12);
  });
  node.addEventListener("blur", hide);
}

// ---- Lanes: which section completes which bucket -----------------------------------------------

const PLACE = 32; // pixels from one place to the next, as in the style

function lanesCard() {
  const hasBuckets = (graph) => entriesOf(graph).some((entry) => entry.completed.length);
  const shown = content.graphs.filter((graph) => hasBuckets(graph) || graph.sections.length > 1);
  const others = content.graphs
    .filter((graph) => !shown.includes(graph))
    .map((graph) => graph.name);
  const title = "Sections and buckets";
  if (!buckets.size || !shown.length) {
    return card("lanes", title, "No graph of this model completes a bucket of DDP's yet.");
  }
  const lead = sentences([
    "From top to bottom as backward runs them. Select one to see it everywhere.",
    others.length ? `Without buckets, and not shown: ${numbersOf(shorten(others), "graph")}.` : "",
  ]);
  const left = [...shown].reverse().flatMap((graph) => [graph, ...backwardOrder(graph)]);
  const right = ["buckets, in the order of launch", ...content.buckets];
  const tops = new Map(
    [...left, ...right].map((each, i) => [each, (i < left.length ? i : i - left.length) * PLACE]),
  );
  const height = PLACE * Math.max(left.length, right.length);
  const lines = content.buckets.flatMap((bucket) =>
    completing.get(bucket.index).map((entry) => drawLine(entry, bucket, tops)),
  );
  const middle = draw(
    "svg",
    { height, viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    lines,
  );
  const columns = make(
    "div",
    { class: "columns" },
    make(
      "div",
      { class: "sections" },
      left.map((each) => place(each.section ? sectionButton(each) : graphName(each))),
    ),
    middle,
    make(
      "div",
      { class: "buckets" },
      right.map((each) =>
        place(
          each.index === undefined ? make("span", { class: "name" }, each) : bucketButton(each),
        ),
      ),
    ),
  );
  return card("lanes", title, lead, make("div", { class: "lanes" }, columns));
}

const entriesOf = (graph) =>
  graph.sections.map((section) => entries.get(keyOf(graph.name, section.index)));
const backwardOrder = (graph) =>
  graph.split === "backward" ? entriesOf(graph) : entriesOf(graph).reverse();
const place = (node) => make("div", { class: "place" }, node);

function graphName(graph) {
  return make(
    "span",
    { class: "name" },
    `graph ${graph.name}: ${graph.fallback ? "compiled whole" : `sections of its ${graph.split}`}`,
  );
}

function sectionButton(entry) {
  const { section } = entry;
  return selectButton({ entry }, { "data-section": entry.key }, `section ${section.index}`, [
    count(section.num_nodes, "node"),
    section.first_node && `from ${section.first_node}`,
  ]);
}

function bucketButton(bucket) {
  return selectButton({ bucket }, { "data-bucket": bucket.index }, `bucket ${bucket.index}`, [
    bytes(bucket.num_bytes),
    count(parametersOf(bucket).length, "parameter"),
  ]);
}

function selectButton(target, key, name, facts) {
  return make(
    "button",
    { type: "button", ...key, "aria-pressed": "false", click: () => select(target) },
    make("span", {}, name),
    make("span", {}, join(facts)),
  );
}

function drawLine(entry, bucket, tops) {
  const [from, to] = [entry, bucket].map((end) => tops.get(end) + PLACE / 2);
  const d = `M0,${from} C50,${from} 50,${to} 100,${to}`;
  const isLast = entry === completing.get(bucket.index).at(-1);
  const grip = draw("path", { class: "grip", d, click: () => select({ bucket }) });
  tip(grip, () => [
    `Bucket ${bucket.index}`,
    isLast
      ? `completed by ${entry.key}`
      : `its part in graph ${entry.graph.name} is complete after section ${entry.section.index}`,
  ]);
  const line = draw("path", {
    class: isLast ? "line" : "line part",
    d,
    "data-bucket": bucket.index,
    "data-section": entry.key,
  });
  return [line, grip];
}

// ---- The table of buckets ----------------------------------------------------------------------

function tableCard() {
  if (!buckets.size) return card("buckets", "Buckets", "DDP's buckets are not known yet.");
  const kinds = [...KINDS]
    .reverse()
    .filter((kind) => content.buckets.some((bucket) => bucket[kind]));
  const hasLaunches = content.buckets.some((bucket) => bucket.launched_after !== null);
  const started = (content.measured?.sections ?? []).filter(
    (section) => section.kind === "backward",
  ).length;
  const lead = sentences([
    kinds.length ? `Times in ${UNIT.name} from the end of forward.` : "",
    hasLaunches ? "“Launched after” counts the backward sections that had started by then." : "",
  ]);
  const span = { rowspan: 2 };
  const head = make(
    "thead",
    {},
    make(
      "tr",
      {},
      ["bucket", "size"].map((name) => make("th", { ...span, scope: "col" }, name)),
      ["parameters", "completed by", "shares section with", "as planned"].map((name) =>
        make("th", { ...span, scope: "col", class: "left" }, name),
      ),
      kinds.map((kind) =>
        make("th", { colspan: 3, scope: "colgroup", class: "group start" }, kind),
      ),
      hasLaunches ? make("th", { ...span, scope: "col", class: "start" }, "launched after") : null,
    ),
    make(
      "tr",
      {},
      kinds.map(() =>
        ["ready", "launch", "finish"].map((name, i) =>
          make("th", { scope: "col", class: i ? "" : "start" }, name),
        ),
      ),
    ),
  );
  const rows = content.buckets.map((bucket) => bucketRow(bucket, kinds, hasLaunches, started));
  const total = bytes(sum(content.buckets.map((bucket) => bucket.num_bytes)));
  const foot = make(
    "tfoot",
    {},
    make(
      "tr",
      {},
      make("td", {}, "all"),
      make("td", {}, total),
      make("td", { colspan: 4 + 3 * kinds.length + hasLaunches }),
    ),
  );
  return card(
    "buckets",
    "Buckets",
    lead,
    make("div", { class: "scroll" }, make("table", {}, head, make("tbody", {}, rows), foot)),
  );
}

function bucketRow(bucket, kinds, hasLaunches, started) {
  const chip = make(
    "button",
    { class: "chip", type: "button", "data-bucket": bucket.index, "aria-pressed": "false" },
    `${bucket.index}`,
  );
  const after =
    bucket.launched_after === null
      ? "–"
      : `${bucket.launched_after}${started ? ` of ${started}` : ""}`;
  const press = ({ target }) => {
    const isReading =
      target.closest("details") || (!target.closest("button") && String(getSelection()));
    if (!isReading) select({ bucket });
  };
  const spans =
    bucket.graphs.length > 1
      ? make("span", { class: "tag", title: bucket.graphs.join(", ") }, "spans graphs")
      : null;
  return make(
    "tr",
    { id: `bucket-${bucket.index}`, "data-bucket": bucket.index, click: press },
    make("td", {}, chip),
    make("td", {}, bytes(bucket.num_bytes)),
    make("td", { class: "left" }, parameterDetails(bucket)),
    make("td", { class: "left" }, bucket.completed_by, spans ? " " : "", spans),
    make("td", { class: "left" }, bucket.shares_section_with.join(", ") || "–"),
    make("td", { class: "left" }, planned(bucket)),
    kinds.map((kind) =>
      ["ready_s", "launched_s", "finished_s"].map((field, i) =>
        make("td", { class: i ? "" : "start" }, number(bucket[kind]?.[field])),
      ),
    ),
    hasLaunches ? make("td", { class: "start" }, after) : null,
  );
}

function planned(bucket) {
  if (bucket.is_as_planned === null)
    return make(
      "span",
      { class: "muted", title: "DDP's own bucket and the planned one are not both known" },
      "–",
    );
  return bucket.is_as_planned ? "yes" : make("span", { class: "tag alert" }, "differs");
}

/** The names of a bucket's parameters; where DDP's differ from the planned ones, both. */
function parameterDetails(bucket) {
  const names = parametersOf(bucket);
  const lists = () =>
    bucket.is_as_planned === false
      ? [
          make("p", { class: "quiet" }, "planned"),
          nameList(bucket.planned, new Set(bucket.actual)),
          make("p", { class: "quiet" }, "formed by DDP"),
          nameList(bucket.actual, new Set(bucket.planned)),
        ]
      : [nameList(names)];
  return lazyDetails(join([`${names.length}`, names[0] ?? ""]), lists);
}

function nameList(names, expected = null, query = "") {
  const items = names.map((name) =>
    make(
      "li",
      { class: expected && !expected.has(name) ? "odd" : null },
      make("code", {}, marked(name, query)),
    ),
  );
  return make("ul", { class: "names" }, items);
}

/** A `details` whose inside is made when it is first opened. */
function lazyDetails(title, inside) {
  const node = make("details", {}, make("summary", {}, title));
  node.addEventListener("toggle", () => node.open && node.append(...inside()), { once: true });
  return node;
}

// ---- Graphs and their nodes --------------------------------------------------------------------
// Sections are made when their graph is opened, and of a section's nodes only the rows in view.

const ROW = 24; // pixels, as in the style
const MOST_ROWS = 18; // in view at a time
const BEYOND = 8; // rows drawn above and below
const openLists = new Set();
let query = "";
let showsOnlyMatches = true;

class NodeList {
  constructor() {
    this.drawn = make("div", { class: "drawn" });
    this.space = make("div", { class: "space" }, this.drawn);
    const titles = ["#", "node", "target", "shape", "source"].map((title) =>
      make("span", {}, title),
    );
    const title = make("div", { class: "node title" }, titles);
    const scroll = () => this.draw(true);
    this.view = make(
      "div",
      { class: "view", tabindex: "0", role: "region", "aria-label": "nodes", scroll },
      title,
      this.space,
    );
    this.node = make("div", { class: "nodes" }, this.view);
  }

  /** Take nodes of a section by their positions; `matches` are those to highlight. */
  show(nodes, positions, matches) {
    Object.assign(this, { nodes, positions, matches: new Set(matches), from: -1, to: -1 });
    this.height = Math.min(positions.length, MOST_ROWS) * ROW;
    this.view.style.height = `${this.height + ROW}px`;
    this.space.style.height = `${positions.length * ROW}px`;
    this.node.hidden = positions.length === 0;
    const first = positions.length > matches.length && matches.length ? matches[0] : 0;
    this.view.scrollTop = Math.max(0, first * ROW - this.height / 3);
  }

  /** Draw the rows in view, or none where the whole list is out of view. */
  draw(isVisible) {
    const top = this.view.scrollTop;
    const from = isVisible ? Math.max(0, Math.floor(top / ROW) - BEYOND) : 0;
    const to = isVisible
      ? Math.min(this.positions.length, Math.ceil((top + this.height) / ROW) + BEYOND)
      : 0;
    if (from === this.from && to === this.to) return;
    Object.assign(this, { from, to });
    this.drawn.style.top = `${from * ROW}px`;
    this.drawn.replaceChildren(
      ...this.positions.slice(from, to).map((position) => this.row(position)),
    );
  }

  row(position) {
    const { name, target, shape, source } = this.nodes[position];
    const cells = [name, target, shape, source].map((text) =>
      make("span", { title: text }, marked(text, query)),
    );
    const className =
      query && !showsOnlyMatches && this.matches.has(position) ? "node mono hit" : "node mono";
    return make("div", { class: className }, make("span", {}, `${position + 1}`), cells);
  }
}

/** Draw the lists that are in the window, and empty those that are not. */
function refreshLists() {
  const boxes = [...openLists].map((list) => [list, list.view.getBoundingClientRect()]);
  for (const [list, box] of boxes) {
    list.draw(list.view.checkVisibility() && box.bottom > -300 && box.top < innerHeight + 300);
  }
}

let isRefreshing = false;
function refreshSoon() {
  if (isRefreshing) return;
  isRefreshing = true;
  requestAnimationFrame(() => {
    isRefreshing = false;
    refreshLists();
  });
}

class SectionView {
  constructor(entry) {
    this.entry = entry;
    this.badge = make("span", { class: "tag found", hidden: true });
    const { section, completed } = entry;
    const words = make(
      "span",
      { class: "words" },
      make("b", {}, entry.graph.fallback ? "whole graph" : `section ${section.index}`),
      make("span", {}, count(section.num_nodes, "node")),
      section.first_node ? make("code", { class: "muted" }, `from ${section.first_node}`) : null,
      make(
        "span",
        { class: "tag push" },
        completed.length ? `completes ${numbersOf(completed, "bucket")}` : "completes no bucket",
      ),
      this.badge,
    );
    this.inside = make("div", { class: "inside" });
    this.node = make(
      "details",
      { class: "section", "data-section": entry.key, toggle: () => this.toggled() },
      make("summary", {}, words),
      this.inside,
    );
  }

  toggled() {
    timed("openMs", () => {
      if (this.node.open) this.fill();
      else if (this.list) openLists.delete(this.list);
      refreshLists();
    });
  }

  open() {
    this.node.open = true;
    this.fill();
  }

  fill() {
    if (!this.list) {
      const chips = this.entry.completed.map((index) =>
        make(
          "button",
          {
            class: "chip",
            type: "button",
            "data-bucket": index,
            "aria-pressed": "false",
            click: () => select({ bucket: buckets.get(index) }),
          },
          `bucket ${index}`,
        ),
      );
      this.parameters = make("div");
      this.note = make("p", { class: "quiet" });
      this.list = new NodeList();
      this.inside.append(
        make("div", { class: "completes" }, chips),
        this.parameters,
        this.note,
        this.list.node,
      );
      this.showMatches();
      if (selected) showSelection();
    }
    openLists.add(this.list);
  }

  /** Say why there are fewer or more nodes in the list than the section counts. */
  noteOn(numShown) {
    const { nodes, num_nodes: counted } = this.entry.section;
    if (!nodes.length) return "This explanation does not hold the nodes of this graph.";
    if (!numShown) return "No node of this section was found.";
    const repeats = this.entry.graph.split === "backward" ? nodes.length - counted : 0;
    if (repeats <= 0) return "";
    return `With ${repeats} more that it repeats for itself: views and constants.`;
  }

  /** Show how many of the section's nodes and parameters the search found. */
  showMatches() {
    const { section, matches } = this.entry;
    const found = matches ? matches.nodes.length + matches.parameters.length : 0;
    this.badge.hidden = !matches;
    this.badge.textContent = count(found, "match");
    this.node.classList.toggle("unmatched", matches !== null && found === 0);
    if (!this.list) return;
    const hasFilter = matches !== null && showsOnlyMatches;
    const all = hasFilter ? matches.nodes : section.nodes.map((_, i) => i);
    this.list.show(section.nodes, all, matches?.nodes ?? []);
    this.note.textContent = this.noteOn(all.length);
    const names = hasFilter ? matches.parameters : section.parameters;
    const title = `${count(names.length, "parameter")}${hasFilter ? " found" : ""}`;
    const details = lazyDetails(title, () => [nameList(names, null, query)]);
    details.open = hasFilter && names.length > 0;
    this.parameters.replaceChildren(...(names.length ? [details] : []));
  }
}

class GraphView {
  constructor(graph) {
    this.graph = graph;
    this.entries = entriesOf(graph);
    this.badge = make("span", { class: "tag found", hidden: true });
    const state = graph.fallback
      ? "compiled whole"
      : `${graph.split} split, ${count(graph.sections.length, "section")}`;
    const words = make(
      "span",
      { class: "words" },
      make("span", {}, `Graph ${graph.name}`),
      make("span", { class: "tag push" }, count(graph.num_nodes, "node")),
      make("span", { class: "tag" }, state),
      make("span", { class: "tag" }, graph.inner),
      graph.is_shared ? make("span", { class: "tag" }, "shared") : null,
      this.badge,
    );
    this.inside = make("div", { class: "inside" });
    this.node = make(
      "details",
      { class: "graph", toggle: () => this.toggled() },
      make("summary", {}, words),
      this.inside,
    );
  }

  toggled() {
    if (this.node.open) this.fill();
    refreshLists();
  }

  open() {
    this.node.open = true;
    this.fill();
  }

  fill() {
    if (this.inside.hasChildNodes()) return;
    for (const entry of this.entries) entry.view = new SectionView(entry);
    this.inside.append(
      make("p", { class: "quiet" }, this.graph.headline),
      ...this.entries.map((entry) => entry.view.node),
    );
    this.showMatches();
    if (selected) showSelection();
  }

  showMatches() {
    const found = this.entries.map(({ matches }) =>
      matches ? matches.nodes.length + matches.parameters.length : 0,
    );
    this.badge.hidden = !query;
    this.badge.textContent = count(sum(found), "match");
    for (const entry of this.entries) entry.view?.showMatches();
  }
}

const graphViews = content.graphs.map((graph) => new GraphView(graph));
const searchBox = make("input", {
  type: "search",
  placeholder: "Search nodes, targets, shapes, sources and parameters",
  "aria-label": "search the graphs",
  spellcheck: "false",
  autocomplete: "off",
});
const searchResult = make("output", { class: "quiet", "aria-live": "polite" });

function graphsCard() {
  const total = sum(content.graphs.map((graph) => graph.num_nodes));
  if (!graphViews.length)
    return card("graphs", "Graphs", "ddpopt has compiled no graph of this model yet.");
  const only = make("input", {
    type: "checkbox",
    checked: true,
    change: () => {
      showsOnlyMatches = only.checked;
      search(query);
    },
  });
  let timer = 0;
  searchBox.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => search(searchBox.value), 120);
  });
  const tools = make(
    "div",
    { class: "find", role: "search" },
    searchBox,
    make("label", {}, only, "only matches"),
    action("Open all", () => setAll(true)),
    action("Close all", () => setAll(false)),
    searchResult,
  );
  if (graphViews.length <= 4) graphViews.forEach((view) => view.open());
  if (total <= 80) for (const entry of entries.values()) entry.view?.open();
  const totals = `${count(content.graphs.length, "graph")}, ${count(total, "node")}`;
  const lead = `${totals}, in sections. Open one to see its nodes.`;
  return card("graphs", "Graphs", lead, tools, ...graphViews.map((view) => view.node));
}

function setAll(isOpen) {
  for (const view of graphViews) {
    if (isOpen) view.open();
    for (const entry of view.entries) {
      if (isOpen) entry.view.open();
      else if (entry.view) entry.view.node.open = false;
    }
  }
  refreshLists();
}

function reveal(entry) {
  if (entry.matches?.nodes.length === 0) {
    searchBox.value = ""; // it would hide the nodes
    search("");
  }
  graphViews.find((view) => view.graph === entry.graph).open();
  entry.view.open();
  entry.view.node.scrollIntoView({ block: "start" });
  refreshLists();
}

let openedBySearch = null;

function search(text) {
  timed("searchMs", () => {
    query = text.trim().toLowerCase();
    let nodes = 0;
    let parameters = 0;
    const found = [];
    for (const entry of entries.values()) {
      entry.matches = query ? findIn(entry) : null;
      nodes += entry.matches?.nodes.length ?? 0;
      parameters += entry.matches?.parameters.length ?? 0;
      if (entry.matches?.nodes.length || entry.matches?.parameters.length) found.push(entry);
    }
    for (const view of graphViews) view.showMatches();
    const totals = `${count(nodes, "node")} and ${count(parameters, "parameter")} found`;
    const where = `in ${found.length} of ${count(entries.size, "section")}`;
    searchResult.textContent = query ? `${totals}, ${where}` : "";
    openFirst(found);
    refreshLists();
  });
  writeFragment();
}

/** Open the first section with a match, unless the reader has one open. */
function openFirst(found) {
  if (openedBySearch) openedBySearch.node.open = false;
  openedBySearch = null;
  if (!found.length || found.some((entry) => entry.view?.node.open)) return;
  graphViews.find((view) => view.graph === found[0].graph).open();
  openedBySearch = found[0].view;
  openedBySearch.open();
}

function findIn(entry) {
  const { nodes, parameters } = entry.section;
  entry.haystacks ??= nodes.map((node) =>
    [node.name, node.target, node.shape, node.source].join("\n").toLowerCase(),
  );
  const positions = [];
  entry.haystacks.forEach((text, i) => {
    if (text.includes(query)) positions.push(i);
  });
  return {
    nodes: positions,
    parameters: parameters.filter((name) => name.toLowerCase().includes(query)),
  };
}

// ---- The address: #search=...&select=bucket-3 or section-4/0 section 2 --------------------------

function readFragment() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("select")) {
    const [, kind, name] = /^(bucket|section)-(.*)$/s.exec(wanted.get("select")) ?? [];
    const bucket = kind === "bucket" && buckets.get(Number(name));
    const entry = kind === "section" && entries.get(name);
    selected = bucket ? { bucket } : entry ? { entry } : null;
    showSelection();
  }
  if (wanted.has("search")) {
    searchBox.value = wanted.get("search");
    search(searchBox.value);
    document.getElementById("graphs").scrollIntoView();
    refreshLists();
  }
}

function writeFragment() {
  const state = new URLSearchParams();
  if (query) state.set("search", query);
  if (selected)
    state.set(
      "select",
      selected.bucket ? `bucket-${selected.bucket.index}` : `section-${selected.entry.key}`,
    );
  try {
    history.replaceState(null, "", `#${state}`);
  } catch {
    // Within another page's frame the address may not be ours to change.
  }
}

// ---- The page ----------------------------------------------------------------------------------

const whenShown = [];

function card(id, title, lead, ...children) {
  return make(
    "section",
    { class: "card", id },
    make("div", { class: "head" }, make("h2", {}, title), make("p", { class: "quiet" }, lead)),
    ...children,
  );
}

function bar() {
  const names = {
    timeline: "Timeline",
    lanes: "Sections and buckets",
    buckets: "Buckets",
    graphs: "Graphs",
  };
  const anchors = Object.entries(names).map(([id, name]) => make("a", { href: `#${id}` }, name));
  return make(
    "div",
    { class: "bar" },
    make(
      "div",
      {},
      make("strong", {}, content.model),
      make("nav", { "aria-label": "parts of the page" }, anchors),
    ),
  );
}

document.title = `${content.model}: ddpopt explanation`;
document.body.append(
  bar(),
  make("main", {}, header(), timelineCard(), lanesCard(), tableCard(), graphsCard()),
  chosen.bar,
  bubble,
);
whenShown.forEach((show) => show());
addEventListener("scroll", refreshSoon, { passive: true });
addEventListener("resize", refreshSoon);
addEventListener("hashchange", readFragment);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected && event.target !== searchBox) select(null);
});
page.dataset.buildMs = (performance.now() - startedAt).toFixed(1);
readFragment();
refreshLists();
page.dataset.ready = "true";
