// The page: fills in the data, links the zoom of the charts, and answers hovering and clicks.
const data = JSON.parse(document.getElementById("data").textContent);
const charts = {};
const state = { colouring: "class", module: null, block: null, mark: null };

// -- names and decisions ----------------------------------------------------------------------------------------------

function nameModule(data, place) {
  return place < 0 ? "outside of modules" : escapeHtml(data.names[place] || "the model itself");
}

function nameStorage(data, storage) {
  const label = escapeHtml(data.names[data.storages.label[storage]]);
  const module = data.storages.module[storage];
  return module < 0 || label.includes(escapeHtml(data.names[module]) + ".") || !data.names[module]
    ? label : `${label} of ${escapeHtml(data.names[module])}`;
}

const gapsOf = new Map();
data.gaps.storage.forEach((storage, index) => {
  if (!gapsOf.has(storage)) gapsOf.set(storage, []);
  gapsOf.get(storage).push(index);
});
// What is not kept comes first, then the longest.
for (const gaps of gapsOf.values()) {
  const isKept = (gap) => Number(data.gaps.decision[gap] === "keep");
  gaps.sort((one, other) => isKept(one) - isKept(other) || data.gaps.seconds[other] - data.gaps.seconds[one]);
}
const MOST_GAPS = 6;
const ORDER = { keep: 0, recompute: 1, offload: 2 };
const decisionOf = data.storages.nbytes.map((_, storage) => {
  const gaps = gapsOf.get(storage) || [];
  return gaps.reduce((most, gap) => most === "-" || ORDER[data.gaps.decision[gap]] > ORDER[most]
    ? data.gaps.decision[gap] : most, "-");
});
const CLASS_NAMES = Object.keys(data.colours.classes);

function describeGap(gap) {
  const gaps = data.gaps;
  const reason = data.names[gaps.reason[gap]];
  const kept = gaps.kept_peak_bytes[gap];
  const beyond = data.budget_bytes ? kept - data.budget_bytes : 0;
  const keep = beyond > 0 ? `<span class="over">peak ${formatBytes(kept)}: ${formatBytes(beyond)} over budget</span>`
    : `peak ${formatBytes(kept)}${data.budget_bytes ? ": fits" : ""}`;
  const offload = gaps.is_movable[gap]
    ? `${formatSeconds(gaps.out[gap])} out, ${formatSeconds(gaps.back[gap])} back; ` + (gaps.exposed[gap] > 0
      ? `${formatSeconds(gaps.exposed[gap])} of delay` : "hidden behind compute")
    : "not possible";
  const recompute = gaps.replay[gap] === null ? "not possible"
    : `${formatSeconds(gaps.replay[gap])} if alone, ${gaps.replay_ops[gap]} op${gaps.replay_ops[gap] === 1 ? "" : "s"}`;
  const rows = [["keep", keep], ["offload", offload], ["recompute", recompute]].map(([choice, text]) =>
    `<tr><td>${choice === gaps.decision[gap] ? "<b>" + choice + "</b> ✓" : choice}</td><td>${text}</td></tr>`).join("");
  return `<div><em>unused for ${formatSeconds(gaps.seconds[gap])}; each choice would cost:</em><table>${rows}</table>` +
    (reason ? `<em>${escapeHtml(reason)}</em>` : "") + "</div>";
}

function explainNoChoice(storage) {
  const name = CLASS_NAMES[data.storages.class[storage]];
  if (["parameter", "buffer", "optimizer_state", "gradient"].includes(name)) return "model state: it stays";
  if (name === "input") return "the program holds it";
  return "never saved for the backward pass, or needed at once: there is no gap in which it could leave";
}

function describeBlock(data, block, all) {
  const storage = data.blocks.storage[block];
  const gaps = gapsOf.get(storage) || [];
  const line = data.names[data.storages.line[storage]];
  const shown = gaps.slice(0, all ? MOST_GAPS : 1);
  const decision = decisionOf[storage];
  return `<b>${nameStorage(data, storage)}</b><br>` +
    `${formatBytes(data.storages.nbytes[storage])}, ${nameClass(CLASS_NAMES[data.storages.class[storage]])}` +
    `${decision === "-" ? "" : `, decision: <b>${decision}</b>`}<br>` +
    `<em>module ${nameModule(data, data.storages.module[storage])}${line ? ", " + escapeHtml(line) : ""}</em><br>` +
    `<em>on the device from ${formatSeconds(data.blocks.begin[block])} to ${formatSeconds(data.blocks.end[block])}` +
    `</em><br>${shown.map(describeGap).join("") || `<em>${explainNoChoice(storage)}</em>`}` +
    (gaps.length > shown.length ? `<em>and ${gaps.length - shown.length} shorter or kept gaps</em>` : "");
}

// -- head and tables --------------------------------------------------------------------------------------------------

function formatFigure(unit, value) {
  if (value === null || value === undefined) return "–";
  return unit === "bytes" ? formatBytes(value) : unit === "seconds" ? formatSeconds(value) : String(value);
}

function fillHead() {
  const [peak, seconds] = data.comparison;
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = `captured on ${data.device}, priced for ${data.machine} (op times ` +
    `${data.are_costs_measured ? "measured" : "estimated"}); strategy ${data.strategy}`;
  const figures = [
    ["budget", data.budget_bytes ? formatBytes(data.budget_bytes) : "none"],
    ["peak, plain", formatBytes(peak[2])],
    ["peak, forecast", formatBytes(peak[3])],
    ["peak, measured", formatBytes(peak[4])],
    ["step, plain", formatSeconds(seconds[2])],
    ["step, forecast", formatSeconds(seconds[3])],
    ["step, measured", formatSeconds(seconds[4])],
  ].filter(([, text]) => text !== "–");
  document.getElementById("figures").innerHTML = figures
    .map(([name, text]) => `<div><b>${text}</b><span>${name}</span></div>`).join("");
  for (const name of ["plain", "planned"]) {
    const curve = data[name];
    document.getElementById(name + "-peak").textContent = `– peak ${formatBytes(curve.peak_bytes)} at ` +
      `${formatSeconds(curve.peak_at)}, step ${formatSeconds(curve.seconds)}`;
  }
}

function fillComparison() {
  const isMeasured = data.steps.length > 0;
  const head = ["", "plain, forecast", "forecast"].concat(isMeasured ? ["measured"] : []);
  const rows = data.comparison.map(([name, unit, ...values]) => [name].concat(
    values.slice(0, isMeasured ? 3 : 2).map((value) => formatFigure(unit, value))));
  document.getElementById("comparison").innerHTML =
    `<tr>${head.map((each) => `<th scope="col">${each}</th>`).join("")}</tr>` +
    rows.map((row) => `<tr>${row.map((each) => `<td>${each}</td>`).join("")}</tr>`).join("");
  document.getElementById("steps-note").textContent = isMeasured
    ? "Each bar is a measured step; the measured column is the median of the steady ones."
    : "No step was measured: the figures are forecasts.";
}

// -- modules ----------------------------------------------------------------------------------------------------------

function buildTree() {
  const root = { name: "", path: null, figures: [0, 0, 0, 0, 0], inner: new Map() };
  const others = [];
  for (const [path, ...figures] of data.modules) {
    if (path === null || path === "") {
      others.push({ name: path === null ? "outside of modules" : "the model itself", path: path, figures: figures,
        inner: new Map() });
      continue;
    }
    let node = root;
    const parts = path.split(".");
    parts.forEach((part, depth) => {
      if (!node.inner.has(part)) {
        node.inner.set(part, { name: part, path: parts.slice(0, depth + 1).join("."), figures: [0, 0, 0, 0, 0],
          inner: new Map() });
      }
      node = node.inner.get(part);
      figures.forEach((figure, place) => { node.figures[place] += figure; });
    });
  }
  return [...root.inner.values(), ...others];
}

function renderNode(node, mostSaved, depth) {
  const [peak, , kept, offloaded, recomputed] = node.figures;
  const parts = [["keep", kept], ["offload", offloaded], ["recompute", recomputed]];
  const bar = parts.map(([choice, nbytes]) =>
    `<span style="width:${(100 * nbytes) / mostSaved}%;background:${data.colours.choices[choice]}"></span>`).join("");
  const title = parts.map(([choice, nbytes]) => `${choice} ${formatBytes(nbytes)}`).join(", ");
  const row = `<span class="name">${escapeHtml(node.name)}</span><span class="bar" title="${title}">${bar}</span>` +
    `<span class="bytes">${formatBytes(peak)}</span>`;
  const attributes = `class="module" data-path="${node.path === null ? "*" : escapeHtml(node.path)}"`;
  if (!node.inner.size) return `<div ${attributes}>${row}</div>`;
  return `<details${depth < 1 ? " open" : ""}><summary ${attributes}>${row}</summary>${
    [...node.inner.values()].map((each) => renderNode(each, mostSaved, depth + 1)).join("")}</details>`;
}

function fillModules() {
  const tree = buildTree();
  const most = Math.max(1, ...tree.map((node) => node.figures[2] + node.figures[3] + node.figures[4]));
  const box = document.getElementById("modules");
  box.innerHTML = tree.map((node) => renderNode(node, most, 0)).join("");
  box.addEventListener("click", (event) => {
    const row = event.target.closest(".module");
    if (row) selectModule(row);
  });
}

function selectModule(row) {
  const again = row.classList.contains("selected");
  document.querySelectorAll(".module.selected").forEach((each) => each.classList.remove("selected"));
  state.module = again ? null : row.dataset.path;
  if (!again) row.classList.add("selected");
  repaint();
  fillList();
}

function isInModule(storage) {
  if (state.module === null) return true;
  const place = data.storages.module[storage];
  if (state.module === "*") return place < 0;
  if (place < 0) return false;
  const path = data.names[place];
  return path === state.module || (state.module !== "" && path.startsWith(state.module + "."));
}

function fillList() {
  const largest = data.blocks.storage.map((_, index) => index).filter((index) =>
    isInModule(data.blocks.storage[index])).sort((one, other) => data.blocks.nbytes[other] - data.blocks.nbytes[one]);
  document.getElementById("list-heading").textContent = state.module === null ? "Largest blocks"
    : `Largest blocks of ${state.module === "*" ? "no module" : state.module || "the model itself"}`;
  document.getElementById("list").innerHTML = `<table><tr><th>storage</th><th>bytes</th><th>decision</th></tr>${
    largest.slice(0, 60).map((index) => {
      const storage = data.blocks.storage[index];
      return `<tr data-block="${index}"><td>${nameStorage(data, storage)}</td><td>${
        formatBytes(data.blocks.nbytes[index])}</td><td>${decisionOf[storage]}</td></tr>`;
    }).join("")}</table>`;
}

// -- charts -----------------------------------------------------------------------------------------------------------

function paint(block) {
  const storage = data.blocks.storage[block];
  const colour = state.colouring === "class" ? data.colours.classes[CLASS_NAMES[data.storages.class[storage]]]
    : data.colours.choices[decisionOf[storage]];
  return { fill: colour, opacity: isInModule(storage) ? 0.92 : 0.13 };
}

function repaint() {
  charts.blocks.setOption({ series: [{ data: charts.blocks.getOption().series[0].data }] });
  const isClass = state.colouring === "class";
  document.getElementById("by-class").setAttribute("aria-pressed", String(isClass));
  document.getElementById("by-decision").setAttribute("aria-pressed", String(!isClass));
  fillLegend("block-legend", isClass ? listClassLegend() : [["keep", data.colours.choices.keep],
    ["offload", data.colours.choices.offload], ["recompute", data.colours.choices.recompute],
    ["no choice", data.colours.choices["-"]]]);
}

function listClassLegend() {
  return CLASS_NAMES.filter((name) => [data.plain, data.planned].some((curve) =>
    (curve.bytes[name] || []).some((nbytes) => nbytes > 0))).map((name) => [nameClass(name), data.colours.classes[name]]);
}

function selectBlock(block) {
  state.block = block;
  document.getElementById("detail").innerHTML = describeBlock(data, block, true);
  markSelection();
}

function markSelection() {
  // Drawn above the chart, so that a click need not draw all blocks again.
  if (state.block === null) return;
  const blocks = data.blocks;
  const end = state.block;
  const [left, top] = charts.blocks.convertToPixel({ gridIndex: 0 }, [blocks.begin[end],
    blocks.offset[end] + blocks.nbytes[end]]);
  const [right, bottom] = charts.blocks.convertToPixel({ gridIndex: 0 }, [blocks.end[end], blocks.offset[end]]);
  const grid = charts.blocks.getModel().getComponent("grid").coordinateSystem.getRect();
  const clip = (value, least, most) => Math.min(Math.max(value, least), most);
  const x = clip(left, grid.x, grid.x + grid.width);
  const y = clip(top, grid.y, grid.y + grid.height);
  if (!state.mark) {
    state.mark = new echarts.graphic.Rect({ silent: true, z: 100, style: { fill: "none", stroke: "#111111",
      lineWidth: 2 } });
    charts.blocks.getZr().add(state.mark);
  }
  state.mark.setShape({ x: x, y: y, width: clip(right, grid.x, grid.x + grid.width) - x,
    height: clip(bottom, grid.y, grid.y + grid.height) - y });
}

function listLaneRows() {
  const rows = [];
  for (const [lanes, suffix] of [[data.lanes, ""], [data.measured_lanes, ", measured"]]) {
    for (const name of ["compute", "recompute", "offload", "reload", "disk"]) {
      const items = [];
      lanes.lane.forEach((lane, index) => {
        if (LANES[lane] === name || (name === "compute" && LANES[lane] === "stall")) items.push(index);
      });
      const title = suffix && name === "compute" ? "stall" : name; // ops of a real step are not timed one by one
      if (items.length || !suffix) rows.push({ name: title + (isNarrow() ? suffix.replace(" ", "\n") : suffix),
        lanes: lanes, items: items });
    }
  }
  return rows;
}

function linkZoom(names) {
  let isBusy = false;
  for (const name of names) {
    charts[name].on("datazoom", () => {
      if (isBusy) return;
      isBusy = true;
      const { start, end } = charts[name].getOption().dataZoom[0];
      for (const other of names) {
        if (other !== name) charts[other].dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: start, end: end });
      }
      isBusy = false;
    });
  }
}

function isBudgetFar() {
  return data.budget_bytes > 2 * Math.max(data.plain.peak_bytes, data.planned.peak_bytes);
}

function listOptions() {
  const seconds = Math.max(data.plain.seconds, data.planned.seconds, 0, ...data.measured_lanes.end);
  const peak = Math.max(data.plain.peak_bytes, data.planned.peak_bytes, 1);
  const most = Math.max(peak, isBudgetFar() ? 0 : data.budget_bytes) * 1.04;
  const highest = data.blocks.offset.reduce((top, offset, index) => Math.max(top, offset + data.blocks.nbytes[index]), 1);
  const rows = listLaneRows();
  document.getElementById("lanes").style.height = 60 + 34 * rows.length + "px";
  return {
    plain: makeCurveOption(data, data.plain, most, seconds),
    planned: makeCurveOption(data, data.planned, most, seconds),
    lanes: makeLaneOption(data, rows, seconds),
    blocks: makeBlockOption(data, highest, seconds, paint),
    steps: data.steps.length ? makeStepOption(data) : null,
    front: makeFrontOption(data),
  };
}

function drawCharts() {
  for (const [name, option] of Object.entries(listOptions())) {
    const box = document.getElementById(name);
    if (option === null) {
      box.style.display = "none";
      continue;
    }
    charts[name] = charts[name] || echarts.init(box, null, { renderer: "canvas" });
    charts[name].resize();
    charts[name].setOption(option, true);
  }
}

function start() {
  fillHead();
  fillComparison();
  fillModules();
  fillList();
  drawCharts();
  repaint();
  const lines = data.budget_bytes ? [[isBudgetFar() ? "budget (far above)" : "budget", "#111111", "line"]] : [];
  fillLegend("class-legend", listClassLegend().concat(lines));
  fillLegend("lane-legend", LANES.map((name) => [name, data.colours.lanes[name]]));
  fillLegend("module-legend", ["keep", "offload", "recompute"].map((name) => [name, data.colours.choices[name]]));
  fillLegend("front-legend", listFrontPoints(data).map((each) => [each.name, each.colour])
    .concat(data.front.bounds.length ? [["lower bound", "#111111", "line"]] : [],
      data.budget_bytes ? [["budget", "#888888", "line solid"]] : []));
  linkZoom(["plain", "planned", "lanes", "blocks"]);
  charts.blocks.on("datazoom", markSelection);
  charts.blocks.on("click", (item) => selectBlock(item.value[0]));
  document.getElementById("list").addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-block]");
    if (row) selectBlock(Number(row.dataset.block));
  });
  for (const name of ["class", "decision"]) {
    document.getElementById("by-" + name).addEventListener("click", () => {
      state.colouring = name;
      repaint();
    });
  }
  let pending = 0;
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(pending);
    pending = setTimeout(() => { drawCharts(); repaint(); markSelection(); }, 120);
  });
  document.documentElement.dataset.ready = "yes";
}

start();
