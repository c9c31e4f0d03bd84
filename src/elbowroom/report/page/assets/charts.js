// Options of each chart. All share one axis of time, whose zoom page.js links.
const LINE = "#dfe3e8";
const SOFT = "#566072";

function isNarrow() {
  return window.innerWidth < 700;
}

function makeTooltip(formatter, trigger) {
  return {
    trigger: trigger, confine: true, transitionDuration: 0, showDelay: 0, hideDelay: 60, enterable: false,
    className: "tip", padding: [6, 10], formatter: formatter, axisPointer: { type: "line", animation: false },
  };
}

function makeGrid(extra) {
  return Object.assign({ left: isNarrow() ? 52 : 66, right: isNarrow() ? 14 : 30, top: 26, bottom: 40 }, extra);
}

function makeTimeAxis(most, name) {
  const [unit, size] = chooseTimeUnit(most);
  return {
    type: "value", min: 0, max: most, name: `${name} (${unit})`, nameLocation: "middle", nameGap: 24,
    nameTextStyle: { color: SOFT }, axisLabel: { formatter: (value) => formatTick(value / size), hideOverlap: true,
      showMaxLabel: false }, splitLine: { show: false }, interval: chooseInterval(most / size, isNarrow() ? 4 : 8) * size,
  };
}

function chooseInterval(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 5, 10].find((each) => each * power >= rough) * power;
}

function makeByteAxis(most, name, extra) {
  const [unit, size] = chooseByteUnit(most);
  const interval = chooseInterval(most / size, 5) * size;
  return Object.assign({
    type: "value", min: 0, max: most, interval: interval, name: `${name} (${unit})`,
    nameLocation: "end", nameGap: 10, nameTextStyle: { align: "left", padding: [0, 0, 0, isNarrow() ? -46 : -58],
      color: SOFT },
    axisLabel: { formatter: (value) => formatTick(value / size), showMaxLabel: false },
    splitLine: { lineStyle: { color: LINE }, showMaxLine: false },
  }, extra);
}

function makeZooms(withSlider, withBytes) {
  const zooms = [{ type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false,
    preventDefaultMouseMove: false }];
  if (withSlider) {
    zooms.push({ type: "slider", xAxisIndex: 0, filterMode: "none", height: 18, bottom: 4, showDetail: false,
      brushSelect: false });
  }
  if (withBytes) {
    zooms.push({ type: "inside", yAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false,
      preventDefaultMouseMove: false });
    zooms.push({ type: "slider", yAxisIndex: 0, filterMode: "none", width: 14, right: 2, showDetail: false,
      brushSelect: false });
  }
  return zooms;
}

// -- bytes by class ---------------------------------------------------------------------------------------------------

function makeCurveOption(data, curve, most, lastSecond) {
  const classes = Object.keys(curve.bytes).filter((name) => curve.bytes[name].some((nbytes) => nbytes > 0));
  const sums = curve.at.map(() => 0);
  const tops = classes.map((name) => curve.at.map((_, place) => (sums[place] += curve.bytes[name][place])));
  // Areas reach down to 0, so the highest is drawn first.
  const series = classes.map((name, index) => ({
    name: name, type: "line", step: "end", symbol: "none", silent: true, animation: false, z: classes.length - index,
    lineStyle: { width: 0 }, areaStyle: { color: data.colours.classes[name], opacity: 1 },
    itemStyle: { color: data.colours.classes[name] },
    data: curve.at.map((at, place) => [at, tops[index][place]])
      .concat([[curve.seconds, tops[index][curve.at.length - 1]]]),
  })).reverse();
  if (data.budget_bytes) {
    series.push({ type: "line", data: [], silent: true, z: 50, markLine: {
      silent: true, symbol: "none", animation: false, z: 60, data: [{ yAxis: data.budget_bytes }],
      lineStyle: { color: "#111111", type: "dashed", width: 1.6 },
      label: { formatter: "budget " + formatBytes(data.budget_bytes), position: "insideEndTop", color: "#111111",
        backgroundColor: "rgba(255,255,255,0.85)", padding: [1, 4], distance: 3 },
    } });
  }
  return {
    animation: false, grid: makeGrid(), xAxis: makeTimeAxis(lastSecond, "time in the step"),
    yAxis: makeByteAxis(most, "bytes on the device"), dataZoom: makeZooms(false, false), series: series,
    tooltip: makeTooltip((items) => describeColumn(data, curve, classes, items), "axis"),
  };
}

function describeColumn(data, curve, classes, items) {
  if (!items.length) return "";
  const place = Math.min(items[0].dataIndex, curve.at.length - 1);
  const total = classes.reduce((sum, name) => sum + curve.bytes[name][place], 0);
  const rows = classes.slice().reverse().filter((name) => curve.bytes[name][place]).map((name) =>
    `<tr><td><span style="color:${data.colours.classes[name]}">■</span> ${nameClass(name)}</td>` +
    `<td>${formatBytes(curve.bytes[name][place])}</td></tr>`).join("");
  const over = data.budget_bytes && total > data.budget_bytes
    ? `<div class="over">${formatBytes(total - data.budget_bytes)} over the budget</div>` : "";
  return `<b>${formatBytes(total)}</b> at ${formatSeconds(curve.at[place])}<br><em>${
    escapeHtml(data.names[curve.places[place]])}</em><table>${rows}</table>${over}`;
}

// -- rectangles -------------------------------------------------------------------------------------------------------

const EMPHASIS = { style: { stroke: "#111111", lineWidth: 1.5 } };

function findScale(params, api) {
  // Both axes are linear, so two places are enough for all rectangles of one drawing.
  if (!params.context.scale) {
    const [left, bottom] = api.coord([0, 0]);
    const [right, top] = api.coord([1, 1]);
    params.context.scale = { left: left, bottom: bottom, across: right - left, up: bottom - top };
  }
  return params.context.scale;
}

function drawBlock(data, index, params, api, style) {
  const area = params.coordSys;
  const blocks = data.blocks;
  const { left, bottom, across, up } = findScale(params, api);
  const x = Math.max(left + blocks.begin[index] * across, area.x);
  const width = Math.min(left + blocks.end[index] * across, area.x + area.width) - x;
  const y = Math.max(bottom - (blocks.offset[index] + blocks.nbytes[index]) * up, area.y);
  const height = Math.min(bottom - blocks.offset[index] * up, area.y + area.height) - y;
  if (width <= 0 || height <= 0) return null;
  if (height >= 4 && width >= 4) {
    style.stroke = "#ffffff";
    style.lineWidth = 0.25;
  }
  return { type: "rect", shape: { x: x, y: y, width: Math.max(width, 0.6), height: Math.max(height, 0.2) },
    style: style, emphasis: EMPHASIS };
}

const LANES = ["compute", "recompute", "stall", "offload", "reload", "disk"];

function makeLaneOption(data, rows, lastSecond) {
  const items = [];
  rows.forEach((row, place) => {
    for (const index of row.items) items.push([place, row.lanes.begin[index], row.lanes.end[index], index]);
  });
  return {
    animation: false, grid: makeGrid({ left: isNarrow() ? 78 : 138, top: 6 }),
    xAxis: makeTimeAxis(lastSecond, "time in the step"),
    yAxis: { type: "category", data: rows.map((row) => row.name), inverse: true, axisTick: { show: false },
      splitLine: { show: true, lineStyle: { color: LINE } }, axisLabel: { interval: 0, lineHeight: 13 } },
    dataZoom: makeZooms(false, false),
    tooltip: makeTooltip((item) => describeActivity(data, rows, item.value), "item"),
    series: [{
      type: "custom", progressive: 0, animation: false, encode: { x: [1, 2], y: 0 }, data: items,
      renderItem: (params, api) => {
        const row = rows[api.value(0)];
        const lane = LANES[row.lanes.lane[api.value(3)]];
        const middle = api.coord([api.value(1), api.value(0)])[1];
        const half = api.size([0, 1])[1] * (lane === "stall" ? 0.48 : 0.34);
        const left = api.coord([api.value(1), 0])[0];
        const right = api.coord([api.value(2), 0])[0];
        const area = params.coordSys;
        const x = Math.max(left, area.x);
        const width = Math.min(right, area.x + area.width) - x;
        if (width <= 0) return null;
        return { type: "rect", shape: { x: x, y: middle - half, width: Math.max(width, 0.8), height: 2 * half },
          z2: lane === "stall" ? 2 : 1, style: { fill: data.colours.lanes[lane] },
          emphasis: EMPHASIS };
      },
    }],
  };
}

function describeActivity(data, rows, value) {
  const row = rows[value[0]];
  const index = value[3];
  const lane = LANES[row.lanes.lane[index]];
  const subject = row.lanes.subject[index];
  const times = `${formatSeconds(value[2] - value[1])}, from ${formatSeconds(value[1])} to ${formatSeconds(value[2])}`;
  let what = lane === "recompute" ? "a replay of dropped storages" : `${lane} of model state`;
  if (lane === "compute") {
    what = `<b>${escapeHtml(data.names[data.ops.name[subject]])}</b> in ${nameModule(data, data.ops.module[subject])}`;
  } else if (subject >= 0 && subject < data.storages.nbytes.length) {
    const verb = { stall: "waiting for", offload: "offload of", reload: "reload of", disk: "disk: " }[lane];
    what = `${verb} <b>${nameStorage(data, subject)}</b>, ${formatBytes(data.storages.nbytes[subject])}`;
  }
  return `${what}<br><em>${escapeHtml(row.name.replace("\n", " "))}: ${times}</em>`;
}

function makeBlockOption(data, most, lastSecond, paint) {
  const blocks = data.blocks;
  return {
    animation: false, grid: makeGrid({ bottom: 62, right: isNarrow() ? 22 : 30 }),
    xAxis: makeTimeAxis(lastSecond, "time in the step"), yAxis: makeByteAxis(most, "offset in the arena"),
    dataZoom: makeZooms(true, true),
    tooltip: makeTooltip((item) => describeBlock(data, item.value[0]), "item"),
    series: [{
      type: "custom", progressive: 0, animation: false, encode: { x: [1, 2], y: [3, 4] },
      data: blocks.storage.map((storage, index) => [index, blocks.begin[index], blocks.end[index],
        blocks.offset[index], blocks.offset[index] + blocks.nbytes[index]]),
      renderItem: (params, api) => drawBlock(data, params.dataIndex, params, api, paint(params.dataIndex)),
    }],
  };
}

// -- figures ----------------------------------------------------------------------------------------------------------

function makeStepOption(data) {
  const steps = data.steps;
  const forecast = data.comparison[1][3];
  const [unit, size] = chooseTimeUnit(Math.max(forecast, ...steps.map((each) => each[2])));
  const colours = { capture: "#b07aa1", planned: "#7d8ca3", plain: "#c8ccd2", dynamic: "#edc948", drifted: "#f28e2b" };
  return {
    animation: false, grid: makeGrid({ top: 46 }),
    legend: { top: 0, left: 0, itemHeight: 9, itemWidth: 14, textStyle: { fontSize: 12 } },
    xAxis: { type: "category", data: steps.map((each) => each[0]), name: "step", nameLocation: "middle", nameGap: 24,
      nameTextStyle: { color: SOFT }, axisLabel: { hideOverlap: true } },
    yAxis: { type: "value", name: `step time (${unit})`, nameTextStyle: { align: "left", color: SOFT,
      padding: [0, 0, 0, isNarrow() ? -46 : -58] }, axisLabel: { formatter: (value) => formatTick(value / size) },
      splitLine: { lineStyle: { color: LINE } } },
    tooltip: makeTooltip((items) => describeStep(steps[items[0].dataIndex], forecast), "axis"),
    series: [...new Set(steps.map((each) => each[1]))].map((mode) => ({
      name: mode, type: "bar", stack: "steps", barMaxWidth: 26, itemStyle: { color: colours[mode] },
      data: steps.map((each) => each[1] === mode ? each[2] : null),
    })).concat([{
      name: "forecast", type: "line", symbol: "none", lineStyle: { type: "dashed", color: "#111111", width: 1.5 },
      itemStyle: { color: "#111111" }, data: steps.map(() => forecast),
    }]),
  };
}

function describeStep(step, forecast) {
  const peak = step[3] === null ? "" : `<br>peak ${formatBytes(step[3])}`;
  const note = step[5] ? `<br><em>${escapeHtml(step[5])}</em>` : "";
  return `step ${step[0]}, ${step[1]}: <b>${formatSeconds(step[2])}</b> (forecast ${formatSeconds(forecast)})` +
    `${peak}<br>stalls ${formatSeconds(step[4])}${note}`;
}

function listFrontPoints(data) {
  const front = data.front;
  return [
    { name: "plans for other budgets", colour: "#76b7b2", symbol: "circle", size: 7,
      data: front.plans.map((each) => [each[0], each[1], each[2]]) },
    { name: "plain", colour: "#555555", symbol: "rect", size: 10, data: [front.plain] },
    { name: "this plan, forecast", colour: "#c1121f", symbol: "diamond", size: 15, data: [front.own] },
    { name: "this plan, measured", colour: "#2f6fb0", symbol: "triangle", size: 12,
      data: front.measured ? [front.measured] : [] },
  ].filter((each) => each.data.length);
}

function makeFrontOption(data) {
  const front = data.front;
  const points = listFrontPoints(data);
  const all = points.flatMap((each) => each.data).concat(front.bounds);
  const mostBytes = Math.max(isBudgetFar() ? 0 : data.budget_bytes, ...all.map((each) => each[0]));
  const mostSeconds = Math.max(...all.map((each) => each[1]));
  const [byteUnit, byteSize] = chooseByteUnit(mostBytes);
  const [timeUnit, timeSize] = chooseTimeUnit(mostSeconds);
  const least = Math.min(...all.map((each) => each[1]));
  const interval = chooseInterval((mostBytes * 1.04) / byteSize, 6) * byteSize;
  const spread = Math.max(mostSeconds - least, mostSeconds * 0.05);
  const step = chooseInterval((spread * 1.5) / timeSize, 5) * timeSize;
  return {
    animation: false, grid: makeGrid({ bottom: 44 }),
    xAxis: { type: "value", min: 0, max: mostBytes * 1.06, interval: interval,
      name: `peak on the device (${byteUnit})`, nameLocation: "middle", nameGap: 26, nameTextStyle: { color: SOFT },
      axisLabel: { formatter: (value) => formatTick(value / byteSize), showMaxLabel: false }, splitLine: { lineStyle: { color: LINE } } },
    yAxis: { type: "value", min: Math.max(0, Math.floor((least - spread * 0.2) / step) * step),
      max: Math.ceil((mostSeconds + spread * 0.15) / step) * step, interval: step, name: `step time (${timeUnit})`,
      nameTextStyle: { align: "left", color: SOFT, padding: [0, 0, 0, isNarrow() ? -46 : -58] },
      axisLabel: { formatter: (value) => formatTick(value / timeSize) }, splitLine: { lineStyle: { color: LINE } } },
    tooltip: makeTooltip((item) => `<b>${escapeHtml(item.seriesName)}</b>${item.value[2]
      ? " (" + escapeHtml(item.value[2]) + ")" : ""}<br>${formatBytes(item.value[0])}, ${
      formatSeconds(item.value[1])}`, "item"),
    series: [{
      name: "lower bound", type: "line", symbol: "circle", symbolSize: 5, data: front.bounds,
      lineStyle: { type: "dashed", color: "#111111", width: 1.3 }, itemStyle: { color: "#111111" },
    }, ...points.map((each) => ({
      name: each.name, type: "scatter", symbol: each.symbol, symbolSize: each.size, data: each.data,
      itemStyle: { color: each.colour },
    })), ...(data.budget_bytes ? [{
      type: "line", data: [], silent: true, markLine: { silent: true, symbol: "none", animation: false,
        data: [{ xAxis: data.budget_bytes }], lineStyle: { color: "#888888", type: "solid", width: 1.5 }, label: { show: false } },
    }] : [])],
  };
}
