"use strict";

// The page of an explanation. timeline.js comes before in the same script, and has the timelines.

// ---- Elements ----------------------------------------------------------------------------------
// `make` puts strings in as text. Nothing here parses markup, so a name that looks like markup is
// shown as it is.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "rect", "line", "text", "title", "path", "circle"]);
const page = document.documentElement;

// What went wrong, for whoever looks at the document (tests do).
addEventListener("error", (event) => {
  page.dataset.error = event.message;
});
document.addEventListener("securitypolicyviolation", (event) => {
  page.dataset.error = `blocked by ${event.violatedDirective}`;
});

/** An element, as in `make("td.left", { click }, "text", [others])`; attributes may be left out. */
function make(what, ...parts) {
  const [tag, ...classes] = what.split(".");
  const node = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  const hasAttributes = parts[0] && Object.getPrototypeOf(parts[0]) === Object.prototype;
  for (const [name, value] of Object.entries(hasAttributes ? parts.shift() : {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (isGiven(value)) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...parts.flat(Infinity).filter(isGiven));
  return node;
}

const isGiven = (value) => value !== null && value !== undefined && value !== false;

/** A `details` whose inside is made when it is first opened. */
function makeFold(what, attributes, summary, makeInside) {
  const node = make(what, attributes, make("summary", summary));
  const inside = make("div.inside");
  const fill = () => {
    if (!node.open || inside.isConnected) return;
    node.append(inside);
    inside.append(...makeInside());
    showSelection();
  };
  const open = () => {
    node.open = true;
    fill(); // before the event, for those who look at it now
  };
  node.addEventListener("toggle", fill);
  return { node, open };
}

/** `text` with what was searched for marked. */
function marked(text, query) {
  if (!query) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  let done = 0;
  for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, done)) {
    parts.push(text.slice(done, at), make("mark", text.slice(at, at + query.length)));
    done = at + query.length;
  }
  return [...parts, text.slice(done)];
}

// ---- Words and numbers -------------------------------------------------------------------------

const content = JSON.parse(document.getElementById("explanation").textContent);
const KINDS = ["measured", "predicted"];
const UNIT = unitFor(longestTime());

function longestTime() {
  const times = [content, ...content.buckets].flatMap((each) => KINDS.map((kind) => each[kind]));
  const last = (time) => time?.backward_s ?? time?.finished_s ?? time?.launched_s ?? 0;
  return Math.max(0, ...times.map(last));
}

function unitFor(seconds) {
  if (seconds >= 10) return { name: "s", factor: 1 };
  return seconds < 1e-3 ? { name: "µs", factor: 1e6 } : { name: "ms", factor: 1e3 };
}

/** A time as a number in the unit of this page, with three digits. */
function number(seconds) {
  if (!isGiven(seconds)) return "–";
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
const join = (parts, between = " · ") => parts.filter(Boolean).join(between);
const sentences = (...parts) => join(parts, " ");
const shorten = (names) =>
  names.length > 6 ? [...names.slice(0, 6), `and ${names.length - 6} more`] : names;
const numbersOf = (indices, noun) =>
  indices.length ? `${noun}${indices.length > 1 ? "s" : ""} ${indices.join(", ")}` : "";

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
    const entry = { key, graph, section, completed, matches: null, texts: null, view: null };
    entries.set(key, entry);
    for (const index of completed) completing.get(index).push(entry);
  }
}
for (const bucket of content.buckets) {
  // A graph that is compiled whole completes buckets in its only section.
  const by = bucket.completed_by;
  const last = entries.get(by) ?? entries.get(keyOf(by, 0));
  if (!last) continue;
  if (!last.completed.includes(bucket.index)) last.completed.push(bucket.index);
  const others = completing.get(bucket.index).filter((entry) => entry !== last);
  completing.set(bucket.index, [...others, last]);
}

function keyOf(graph, index) {
  return `${graph} section ${index}`;
}

const entriesOf = (graph) =>
  graph.sections.map((section) => entries.get(keyOf(graph.name, section.index)));
const parametersOf = (bucket) => (bucket.actual.length ? bucket.actual : bucket.planned);
const completedText = ({ completed }) =>
  completed.length ? `completes ${numbersOf(completed, "bucket")}` : "completes no bucket";

function timesText(kind, times) {
  if (!times) return "";
  const finish =
    times.finished_s === null ? "finish not recorded" : `finished ${duration(times.finished_s)}`;
  const start = `ready ${duration(times.ready_s)}, launched ${duration(times.launched_s)}`;
  return `${kind}: ${start}, ${finish}`;
}

function bucketText(bucket) {
  return join([
    bytes(bucket.num_bytes),
    count(parametersOf(bucket).length, "parameter"),
    `completed by ${bucket.completed_by}`,
    ...KINDS.map((kind) => timesText(kind, bucket[kind])),
  ]);
}

function sectionText(entry) {
  const { num_nodes: numNodes, parameters } = entry.section;
  const sizes = [count(numNodes, "node"), count(parameters.length, "parameter")];
  return join([...sizes, completedText(entry)]);
}

// ---- Selection ---------------------------------------------------------------------------------
// One bucket or one section. Whatever shows a bucket or a section carries `data-bucket` or
// `data-section`; a line carries both.

let selected = null; // { bucket } or { entry }
const chosen = { text: make("p"), buttons: make("div.buttons") };
chosen.bar = make(
  "aside.chosen",
  { hidden: true, "aria-label": "selection" },
  make("div", chosen.text, chosen.buttons),
);

function select(next) {
  const isSame =
    next && selected && next.bucket === selected.bucket && next.entry === selected.entry;
  selected = isSame ? null : next;
  showSelection();
  writeFragment();
}

function showSelection() {
  const { bucket: chosenBucket, entry } = selected ?? {};
  const shown = chosenBucket ? completing.get(chosenBucket.index) : entry ? [entry] : [];
  const sections = new Set(shown.map((each) => each.key));
  const completed = chosenBucket ? [chosenBucket.index] : (entry?.completed ?? []);
  const indices = new Set(completed.map(String));
  for (const node of document.querySelectorAll("[data-bucket], [data-section]")) {
    const { bucket, section } = node.dataset;
    const isSelected =
      (bucket === undefined || indices.has(bucket)) &&
      (section === undefined || sections.has(section));
    node.classList.toggle("selected", isSelected);
    if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", isSelected);
  }
  page.classList.toggle("has-selection", selected !== null);
  chosen.bar.hidden = selected === null;
  if (selected) showChosen(chosenBucket, chosenBucket ? shown.at(-1) : entry);
}

/** Say what is selected at the bottom of the window; `entry` is the last one of a bucket. */
function showChosen(bucket, entry) {
  const title = bucket
    ? `Bucket ${bucket.index}`
    : `Section ${entry.section.index} of graph ${entry.graph.name}`;
  const row = bucket && document.getElementById(`bucket-${bucket.index}`);
  chosen.text.replaceChildren(
    make("strong", title),
    ` · ${bucket ? bucketText(bucket) : sectionText(entry)}`,
  );
  const buttons = [
    row && action("In the table", () => row.scrollIntoView({ block: "center" })),
    entry && action("Nodes of the section", () => reveal(entry)),
    action("Clear", () => select(null)),
  ];
  chosen.buttons.replaceChildren(...buttons.filter(isGiven));
}

const action = (text, click) => make("button.button", { type: "button", click }, text);

/** A button that selects a bucket or a section. */
function selectButton(what, target, ...inside) {
  const { bucket, entry } = target;
  const key = bucket ? { "data-bucket": bucket.index } : { "data-section": entry.key };
  const click = (event) => {
    event.stopPropagation(); // of a row that does the same
    select(target);
  };
  return make(what, { type: "button", ...key, "aria-pressed": "false", click }, inside);
}

// ---- Header ------------------------------------------------------------------------------------

// Fallbacks by which overlap is lost, rather than expected ones.
const OVERLAP_LOST = new Set(["NO_LEGAL_CUT", "COLLECTIVES_AND_SIZES", "SECTION_FAILED", "NOT_PROVEN", "SPLIT_FAILED", "TORCH_DRIFT"]);

function header() {
  const versions = Object.entries(content.versions).map(([name, version]) => `${name} ${version}`);
  const hints = content.hints.map((hint) => make("li", hint));
  return make(
    "header",
    make("div.title", make("h1", content.model), make("span.quiet", join(versions))),
    make("dl.facts", facts()),
    tuning(),
    fallbacks(),
    hints.length > 0 &&
      make("section.callout", make("h3", "Notes"), make("ul", hints)),
  );
}

// Sentences, and below them the tables, which are the indented lines and those between them.
function tuning() {
  const isTable = (line) => /^( {2}|$)/.test(line);
  const lines = content.tuning.split("\n");
  const tables = lines.filter(isTable).join("\n").replace(/^\n+|\n+$/g, "");
  const summary = make("summary", "What this was decided from");
  return [
    lines.filter((line) => !isTable(line)).map((line) => make("p", capital(line))),
    tables ? make("details.tables", summary, make("pre.mono", tables)) : null,
  ];
}

function facts() {
  const { predicted, measured } = content;
  const split = content.graphs.filter((graph) => !graph.fallback);
  const total = content.graphs.length;
  const some = split.length < total ? `${split.length} of ` : "";
  const numSections = sum(split.map((graph) => graph.sections.length));
  const exposed = predicted || isGiven(measured?.exposed_s);
  const numBytes = sum(content.buckets.map((bucket) => bucket.num_bytes));
  const iteration = `predicted iteration ${duration(predicted?.iteration_s)}`;
  return [
    fact("dd", "DDP buckets", `${buckets.size}`, bytes(numBytes)),
    fact("dd", "sections", `${numSections}`, `in ${some}${count(total, "graph")}`),
    (predicted || measured) && comparedFact("dd", "backward", "backward_s"),
    exposed && comparedFact("dd.exposed", "waiting for communication", "exposed_s"),
    predicted &&
      fact("dd", "least iteration, whatever the buckets", duration(predicted.bound_s), iteration),
  ];
}

/** The measured time first, where there is one. */
function comparedFact(what, name, field) {
  const known = KINDS.filter((kind) => isGiven(content[kind]?.[field]));
  const [first, second] = known.map((kind) => duration(content[kind][field]));
  const steps = content.measured?.num_steps;
  const basis = known[0] === "measured" && steps > 1 ? `measured, median of ${steps}` : known[0];
  return fact(what, name, first, second ? `${basis}; predicted ${second}` : basis);
}

const fact = (what, name, value, more) =>
  make("div", make("dt", name), make(what, value), make("dd.small", more));

/** One callout for each reason, with all graphs that have it; lost overlap comes first. */
function fallbacks() {
  const reasons = new Map();
  for (const graph of content.graphs) {
    for (const kind of ["fallback", "backward_fallback"]) {
      if (!graph[kind]) continue;
      const key = JSON.stringify([kind, graph[kind]]);
      const isAlert = kind === "instead" || OVERLAP_LOST.has(graph[kind].name);
      if (!reasons.has(key)) reasons.set(key, { kind, reason: graph[kind], isAlert, names: [] });
      reasons.get(key).names.push(graph.name);
    }
  }
  return [...reasons.values()].sort((a, b) => b.isAlert - a.isAlert).map(fallback);
}

function fallback({ kind, reason, isAlert, names }) {
  const what = kind === "fallback" ? "compiled whole" : "cut in forward, not in backward";
  const verb = names.length === 1 ? "is" : "are";
  const [cause, ...remedy] = reason.text.replace(/\.$/, "").split("; ");
  return make(
    isAlert ? "section.callout.alert" : "section.callout",
    { "data-reason": reason.name },
    make("h3", `${capital(numbersOf(shorten(names), "graph"))} ${verb} ${what}`),
    make("p", `${capital(cause)}.`),
    remedy.length > 0 && make("p", make("strong", `${capital(remedy.join("; "))}.`)),
    reason.detail ? make("pre", make("code", reason.detail)) : null,
  );
}

// ---- Lanes: which section completes which bucket -----------------------------------------------

const PLACE = 32; // pixels from one place to the next, as in the style

function lanesCard() {
  const hasBuckets = (graph) => entriesOf(graph).some((entry) => entry.completed.length);
  const isShown = (graph) => hasBuckets(graph) || graph.sections.length > 1;
  const shown = content.graphs.filter(isShown);
  const others = content.graphs.filter((graph) => !isShown(graph)).map((graph) => graph.name);
  const title = "Sections and buckets";
  if (!buckets.size || !shown.length)
    return card("lanes", title, "No graph of this model completes a bucket of DDP's yet.");
  const lead = sentences(
    "From top to bottom as backward runs them. Select one to see it everywhere.",
    others.length && `Without buckets, and not shown: ${numbersOf(shorten(others), "graph")}.`,
  );
  const left = shown.toReversed().flatMap((graph) => [graph, ...backwardOrder(graph)]);
  const height = PLACE * Math.max(left.length, 1 + buckets.size);
  const lines = content.buckets.flatMap((bucket, i) =>
    completing
      .get(bucket.index)
      .map((entry) => drawLine(entry, bucket, left.indexOf(entry), i + 1)),
  );
  const viewBox = `0 0 100 ${height}`;
  const middle = make(
    "svg",
    { height, viewBox, preserveAspectRatio: "none", "aria-hidden": "true" },
    lines,
  );
  const sections = left.map((each) =>
    each.section ? sectionPlace(each) : namePlace(graphName(each)),
  );
  const all = [namePlace("buckets, in the order of launch"), ...content.buckets.map(bucketPlace)];
  const columns = [make("div.sections", sections), middle, make("div.buckets", all)];
  return card("lanes", title, lead, make("div.lanes", make("div.columns", columns)));
}

const backwardOrder = (graph) =>
  graph.split === "backward" ? entriesOf(graph) : entriesOf(graph).reverse();
const graphName = (graph) =>
  `graph ${graph.name}: ${graph.fallback ? "compiled whole" : `sections of its ${graph.split}`}`;
const namePlace = (text) => make("div.place", make("span.name", text));

function sectionPlace(entry) {
  const { index, num_nodes: numNodes, first_node: first } = entry.section;
  const facts = join([count(numNodes, "node"), first && `from ${first}`]);
  return makePlace({ entry }, `section ${index}`, facts);
}

function bucketPlace(bucket) {
  const facts = join([bytes(bucket.num_bytes), count(parametersOf(bucket).length, "parameter")]);
  return makePlace({ bucket }, `bucket ${bucket.index}`, facts);
}

const makePlace = (target, name, facts) =>
  make("div.place", selectButton("button", target, make("span", name), make("span", facts)));

function drawLine(entry, bucket, ...places) {
  const [from, to] = places.map((place) => (place + 0.5) * PLACE);
  const d = `M0,${from} C50,${from} 50,${to} 100,${to}`;
  const isLast = entry === completing.get(bucket.index).at(-1);
  const text = isLast
    ? `completed by ${entry.key}`
    : `its part in graph ${entry.graph.name} is complete after section ${entry.section.index}`;
  const tip = make("title", `Bucket ${bucket.index}\n${text}`);
  const key = { "data-bucket": bucket.index, "data-section": entry.key };
  return [
    make(isLast ? "path.line" : "path.line.part", { d, ...key }),
    make("path.grip", { d, click: () => select({ bucket }) }, tip),
  ];
}

// ---- The table of buckets ----------------------------------------------------------------------

function tableCard() {
  if (!buckets.size) return card("buckets", "Buckets", "DDP's buckets are not known yet.");
  const columns = bucketColumns();
  const titles = columns.map(({ what, title, kind }, i) => {
    if (!kind) return make(what.replace("td", "th"), { rowspan: 2, scope: "col" }, title);
    const isFirst = columns[i - 1].kind !== kind;
    return isFirst && make("th.group.start", { colspan: 3, scope: "colgroup" }, kind);
  });
  const times = columns.filter(({ kind }) => kind);
  const names = times.map(({ what, title }) =>
    make(what.replace("td", "th"), { scope: "col" }, title),
  );
  const lead = sentences(
    times.length && `Times in ${UNIT.name} from the end of forward.`,
    content.buckets.some(isLaunchKnown) &&
      "“Launched after” counts the backward sections that had started by then.",
  );
  const total = bytes(sum(content.buckets.map((bucket) => bucket.num_bytes)));
  const rest = make("td", { colspan: columns.length - 2 });
  const table = make(
    "table",
    make("thead", make("tr", titles), make("tr", names)),
    make("tbody", content.buckets.map((bucket) => bucketRow(bucket, columns))),
    make("tfoot", make("tr", make("td", "all"), make("td", total), rest)),
  );
  return card("buckets", "Buckets", lead, make("div.scroll", table));
}

const isLaunchKnown = (bucket) => bucket.launched_after !== null;

/** What a cell is and holds, and its column's title; those of times have a `kind`. */
function bucketColumns() {
  const chip = (bucket) => selectButton("button.chip", { bucket }, `${bucket.index}`);
  const shared = (bucket) => bucket.shares_section_with.join(", ") || "–";
  const columns = [
    { what: "td", title: "bucket", inside: chip },
    { what: "td", title: "size", inside: (bucket) => bytes(bucket.num_bytes) },
    { what: "td.left", title: "parameters", inside: parameterDetails },
    { what: "td.left", title: "completed by", inside: completedBy },
    { what: "td.left", title: "shares section with", inside: shared },
    { what: "td.left", title: "as planned", inside: planned },
  ];
  for (const kind of KINDS.toReversed()) {
    if (!content.buckets.some((bucket) => bucket[kind])) continue;
    const inside = (field) => (bucket) => number(bucket[kind]?.[field]);
    columns.push(
      { what: "td.start", title: "ready", kind, inside: inside("ready_s") },
      { what: "td", title: "launch", kind, inside: inside("launched_s") },
      { what: "td", title: "finish", kind, inside: inside("finished_s") },
    );
  }
  if (content.buckets.some(isLaunchKnown))
    columns.push({ what: "td.start", title: "launched after", inside: launchedAfter });
  return columns;
}

function bucketRow(bucket, columns) {
  const click = ({ target }) => {
    const isReading = target.closest("details") || String(getSelection());
    if (!isReading) select({ bucket });
  };
  const cells = columns.map(({ what, inside }) => make(what, inside(bucket)));
  return make("tr", { id: `bucket-${bucket.index}`, "data-bucket": bucket.index, click }, cells);
}

function launchedAfter({ launched_after: number }) {
  const sections = content.measured?.sections ?? [];
  const started = sections.filter((section) => section.kind === "backward").length;
  return number === null ? "–" : `${number}${started ? ` of ${started}` : ""}`;
}

function completedBy({ completed_by: by, graphs }) {
  if (graphs.length < 2) return by;
  return [by, " ", make("span.tag", { title: graphs.join(", ") }, "spans graphs")];
}

function planned(bucket) {
  const title = "DDP's own bucket and the planned one are not both known";
  if (bucket.is_as_planned === null) return make("span.muted", { title }, "–");
  return bucket.is_as_planned ? "yes" : make("span.tag.alert", "differs");
}

/** The names of a bucket's parameters; where DDP's differ from the planned ones, both. */
function parameterDetails(bucket) {
  const names = parametersOf(bucket);
  const makeInside = () =>
    bucket.is_as_planned === false
      ? [
          make("p.quiet", "planned"),
          nameList(bucket.planned, (name) => !bucket.actual.includes(name)),
          make("p.quiet", "formed by DDP"),
          nameList(bucket.actual, (name) => !bucket.planned.includes(name)),
        ]
      : [nameList(names)];
  return makeFold("details", {}, join([`${names.length}`, names[0]]), makeInside).node;
}

function nameList(names, isOdd = () => false, query = "") {
  const items = names.map((name) =>
    make(isOdd(name) ? "li.odd" : "li", make("code", marked(name, query))),
  );
  return make("ul.names", items);
}

// ---- Graphs and their nodes --------------------------------------------------------------------
// What is in a section is made when it is opened, and of its nodes only the rows in view.

const ROW = 24; // pixels, as in the style
const MOST_ROWS = 18; // in view at a time
const BEYOND = 8; // rows drawn above and below
let query = "";
let showsOnlyMatches = true;

/** Return the rows at these positions; those in view are drawn as the reader scrolls. */
function nodeList(nodes, positions, matches) {
  const hits = new Set(showsOnlyMatches ? [] : matches);
  const height = Math.min(positions.length, MOST_ROWS) * ROW;
  const drawn = make("div.drawn");
  const space = make("div.space", drawn);
  const titles = ["#", "node", "target", "shape", "source"].map((title) => make("span", title));
  const about = { tabindex: "0", role: "region", "aria-label": "nodes" };
  const view = make("div.view", about, make("div.node.title", titles), space);
  // By the CSSOM: the page's policy allows no style attributes.
  view.style.height = `${height + ROW}px`;
  space.style.height = `${positions.length * ROW}px`;
  const row = (position) => {
    const { name, target, shape, source } = nodes[position];
    const cells = [name, target, shape, source].map((text) =>
      make("span", { title: text }, marked(text, query)),
    );
    const what = hits.has(position) ? "div.node.mono.hit" : "div.node.mono";
    return make(what, make("span", `${position + 1}`), cells);
  };
  const drawRows = () => {
    const from = Math.max(0, Math.floor(view.scrollTop / ROW) - BEYOND);
    const to = Math.ceil((view.scrollTop + height) / ROW) + BEYOND;
    drawn.style.top = `${from * ROW}px`;
    drawn.replaceChildren(...positions.slice(from, to).map(row));
  };
  view.addEventListener("scroll", drawRows);
  drawRows();
  const first = positions.length > matches.length && matches.length ? matches[0] : 0;
  const scroll = () => {
    view.scrollTop = Math.max(0, first * ROW - height / 3);
  };
  return { node: make("div.nodes", { hidden: !positions.length }, view), scroll };
}

/** What is shown of a section: a fold, and what a search changes in it. */
function sectionView(entry) {
  const { graph, section, completed } = entry;
  const badge = make("span.tag.found", { hidden: true });
  const summary = make(
    "span.words",
    make("b", graph.fallback ? "whole graph" : `section ${section.index}`),
    make("span", count(section.num_nodes, "node")),
    section.first_node ? make("code.muted", `from ${section.first_node}`) : null,
    make("span.tag.push", completedText(entry)),
    badge,
  );
  const found = make("div");
  const chips = completed.map((index) =>
    selectButton("button.chip", { bucket: buckets.get(index) }, `bucket ${index}`),
  );
  const fold = makeFold("details.section", { "data-section": entry.key }, summary, () => {
    showFound();
    return [make("div.completes", chips), found];
  });
  const showFound = () => {
    const { matches } = entry;
    const hasFilter = matches !== null && showsOnlyMatches;
    const positions = hasFilter ? matches.nodes : section.nodes.map((_, i) => i);
    const list = nodeList(section.nodes, positions, matches?.nodes ?? []);
    const names = hasFilter ? matches.parameters : section.parameters;
    const title = `${count(names.length, "parameter")}${hasFilter ? " found" : ""}`;
    const inside = () => [nameList(names, undefined, query)];
    const parameters = makeFold("details", { hidden: !names.length }, title, inside);
    if (hasFilter && names.length) parameters.open();
    const note = make("p.quiet", noteOn(entry, positions.length));
    found.replaceChildren(parameters.node, note, list.node);
    requestAnimationFrame(list.scroll); // once it is in the document
  };
  const showMatches = () => {
    const numFound = numMatches(entry);
    badge.hidden = !entry.matches;
    badge.textContent = count(numFound, "match");
    fold.node.classList.toggle("unmatched", entry.matches !== null && numFound === 0);
    if (found.isConnected) showFound();
  };
  return { ...fold, showMatches };
}

const numMatches = ({ matches }) =>
  matches ? matches.nodes.length + matches.parameters.length : 0;

/** Say why there are fewer or more nodes in the list than the section counts. */
function noteOn({ graph, section }, numShown) {
  const { nodes, num_nodes: counted } = section;
  if (!nodes.length) return "The nodes are not known: this graph's code came from a cache.";
  if (!numShown) return "No node of this section was found.";
  const repeats = graph.split === "backward" ? nodes.length - counted : 0;
  return repeats > 0 ? `With ${repeats} more that it repeats for itself: views and constants.` : "";
}

function graphView(graph) {
  const badge = make("span.tag.found", { hidden: true });
  const state = graph.fallback
    ? "compiled whole"
    : `${graph.split} split, ${count(graph.sections.length, "section")}`;
  const own = entriesOf(graph);
  for (const entry of own) entry.view = sectionView(entry);
  const summary = make(
    "span.words",
    make("span", `Graph ${graph.name}`),
    make("span.tag.push", count(graph.num_nodes, "node")),
    [state, graph.inner, graph.is_shared && "shared"]
      .filter(Boolean)
      .map((text) => make("span.tag", text)),
    badge,
  );
  const sections = own.map((entry) => entry.view.node);
  const inside = make("div.inside", make("p.quiet", graph.headline), sections);
  const node = make("details.graph", make("summary", summary), inside);
  const showMatches = () => {
    badge.hidden = !query;
    badge.textContent = count(sum(own.map(numMatches)), "match");
    for (const entry of own) entry.view.showMatches();
  };
  return { graph, node, showMatches };
}

const graphViews = content.graphs.map(graphView);
const searchResult = make("output.quiet", { "aria-live": "polite" });
let timer = 0;
const searchBox = make("input", {
  type: "search",
  placeholder: "Search nodes, targets, shapes, sources and parameters",
  "aria-label": "search the graphs",
  spellcheck: "false",
  autocomplete: "off",
  input: () => {
    clearTimeout(timer);
    timer = setTimeout(() => search(searchBox.value), 120);
  },
});

function graphsCard() {
  if (!graphViews.length)
    return card("graphs", "Graphs", "ddpopt has compiled no graph of this model yet.");
  const change = ({ target }) => {
    showsOnlyMatches = target.checked;
    search(query);
  };
  const tools = make(
    "div.find",
    { role: "search" },
    searchBox,
    make("label", make("input", { type: "checkbox", checked: true, change }), "only matches"),
    action("Open all", () => setAll(true)),
    action("Close all", () => setAll(false)),
    searchResult,
  );
  const total = sum(content.graphs.map((graph) => graph.num_nodes));
  for (const view of graphViews) view.node.open = graphViews.length <= 4;
  if (total <= 80) for (const entry of entries.values()) entry.view.open();
  const totals = `${count(content.graphs.length, "graph")}, ${count(total, "node")}`;
  const lead = `${totals}, in sections. Open one to see its nodes.`;
  return card("graphs", "Graphs", lead, tools, ...graphViews.map((view) => view.node));
}

function setAll(isOpen) {
  for (const view of graphViews) view.node.open ||= isOpen;
  for (const { view } of entries.values()) {
    if (isOpen) view.open();
    else view.node.open = false;
  }
}

function openEntry(entry) {
  graphViews.find((view) => view.graph === entry.graph).node.open = true;
  entry.view.open();
}

function reveal(entry) {
  if (entry.matches?.nodes.length === 0) {
    searchBox.value = ""; // it would hide the nodes
    search("");
  }
  openEntry(entry);
  entry.view.node.scrollIntoView({ block: "start" });
}

let openedBySearch = null;

function search(text) {
  query = text.trim().toLowerCase();
  const all = [...entries.values()];
  for (const entry of all) entry.matches = query ? findIn(entry) : null;
  for (const view of graphViews) view.showMatches();
  const found = all.filter(numMatches);
  const total = (field) => sum(found.map(({ matches }) => matches[field].length));
  const totals = `${count(total("nodes"), "node")} and ${count(total("parameters"), "parameter")}`;
  const where = `in ${found.length} of ${count(all.length, "section")}`;
  searchResult.textContent = query ? `${totals} found, ${where}` : "";
  // Open the first section with a match, unless the reader has one open.
  if (openedBySearch) openedBySearch.view.node.open = false;
  const isOpen = found.some((entry) => entry.view.node.open);
  openedBySearch = isOpen ? null : (found[0] ?? null);
  if (openedBySearch) openEntry(openedBySearch);
  writeFragment();
}

function findIn(entry) {
  const { nodes, parameters } = entry.section;
  entry.texts ??= nodes.map(({ name, target, shape, source }) =>
    [name, target, shape, source].join("\n").toLowerCase(),
  );
  return {
    nodes: [...entry.texts.keys()].filter((position) => entry.texts[position].includes(query)),
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
  }
}

function writeFragment() {
  const state = new URLSearchParams();
  const { bucket, entry } = selected ?? {};
  if (query) state.set("search", query);
  if (selected) state.set("select", bucket ? `bucket-${bucket.index}` : `section-${entry.key}`);
  try {
    history.replaceState(null, "", `#${state}`);
  } catch {
    // Within another page's frame the address may not be ours to change.
  }
}

// ---- The page ----------------------------------------------------------------------------------

function card(id, title, lead, ...children) {
  const head = make("div.head", make("h2", title), make("p.quiet", lead));
  return make("section.card", { id }, head, children);
}

function bar() {
  const anchors = [...document.querySelectorAll("section.card")].map(({ id, firstChild }) =>
    make("a", { href: `#${id}` }, firstChild.firstChild.textContent),
  );
  const nav = make("nav", { "aria-label": "parts of the page" }, anchors);
  return make("div.bar", make("div", make("strong", content.model), nav));
}

document.title = `${content.model}: ddpopt explanation`;
document.body.append(
  make("main", header(), timelineCard(), lanesCard(), tableCard(), graphsCard()),
  chosen.bar,
);
document.body.prepend(bar());
drawTimeline();
addEventListener("resize", () => drawTimeline());
addEventListener("hashchange", readFragment);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected && event.target !== searchBox) select(null);
});
readFragment();
page.dataset.ready = "true";
