"use strict";
// Text of bytes and seconds, as in the reports, and HTML that is safe for any name.
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function formatBytes(nbytes) {
  if (nbytes === null || nbytes === undefined) return "–";
  for (const [unit, size] of UNITS) {
    if (Math.abs(nbytes) >= size) return (nbytes / size).toFixed(size >= 2 ** 30 ? 2 : 1) + "\u00a0" + unit;
  }
  return nbytes + "\u00a0B";
}

function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 120) return Math.floor(seconds / 60) + "\u00a0min " + Math.round(seconds % 60) + "\u00a0s";
  if (seconds >= 1 || seconds === 0) return seconds.toFixed(2) + "\u00a0s";
  if (seconds >= 1e-3) return (seconds * 1e3).toFixed(1) + "\u00a0ms";
  return (seconds * 1e6).toFixed(1) + "\u00a0µs";
}

function chooseByteUnit(most) {
  return UNITS.find(([, size]) => most >= size) || ["B", 1];
}

function chooseTimeUnit(most) {
  return most >= 2 ? ["s", 1] : most >= 2e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
}

function formatTick(value) {
  return Number(value.toPrecision(4)).toString();
}

function escapeHtml(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return String(text).replace(/[&<>"']/g, (each) => entities[each]);
}

function nameClass(name) {
  return name.replaceAll("_", " ");
}

function fillLegend(id, entries) {
  document.getElementById(id).innerHTML = entries
    .map(([text, colour, kind]) => `<span><i class="${kind || ""}" style="${kind
      ? "border-color" : "background"}:${colour}"></i>${escapeHtml(text)}</span>`)
    .join("");
}
