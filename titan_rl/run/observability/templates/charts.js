// Draws each element of class "chart" from the JSON in it, in the colours that the page has at the time.
"use strict";

const STYLES = {
  line: { width: 1.8 },
  faint: { width: 1, alpha: 0.35, points: { show: false } },
  dots: { width: 1.4, dash: [4, 4], spanGaps: true, points: { show: true, size: 7 } },
};

function short(value) {
  if (value == null) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential().replace(/(\.\d\d)\d*/, "$1");
  return value.toLocaleString("en", { notation: Math.abs(value) < 1e4 ? "standard" : "compact", maximumSignificantDigits: 4 });
}

function range(_, low, high) {
  const margin = Math.abs(low) / 2 || 1;
  return low === high ? [low - margin, low + margin] : uPlot.rangeNum(low, high, 0.1, true);
}

function draw(element) {
  const chart = JSON.parse(element.querySelector("script").textContent);
  const style = name => getComputedStyle(element).getPropertyValue(name).trim();
  const axis = label => ({
    label, labelSize: 16, labelFont: "11px system-ui", font: "11px system-ui", stroke: style("--soft"),
    grid: { stroke: style("--grid"), width: 1 }, ticks: { show: false },
    values: (_, ticks) => ticks.map(short),
  });
  const size = () => ({ width: element.clientWidth, height: parseFloat(style("--height")) });
  const plot = new uPlot({
    ...size(),
    scales: { x: { time: false }, y: { range } },
    axes: [{ ...axis("step"), size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] },
      { ...axis(chart.y_label), size: 44 }],
    cursor: { sync: { key: "step" }, y: false },
    series: [{ label: "step" }, ...chart.series.map(one => ({
      label: one.label, stroke: style(`--s${one.colour}`), value: (_, y) => short(y), ...STYLES[one.style],
    }))],
  }, uPlot.join(chart.series.map(one => [one.points.map(p => p[0]), one.points.map(p => p[1])])), element);
  const watch = new ResizeObserver(() => plot.setSize(size()));
  watch.observe(element);
  return () => { watch.disconnect(); plot.destroy(); };
}

let drawn = [];
function drawAll() {
  for (const remove of drawn) remove();
  drawn = [...document.querySelectorAll(".chart")].map(draw);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
