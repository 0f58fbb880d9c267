// Charts of a run's metrics by step. One request serves all charts of a page; a refreshed page fetches new steps only.
const HEIGHT = 170;
const COLOURS = ["#0969da", "#bc4c00", "#1a7f37", "#8250df", "#cf222e", "#0a7ea4", "#9a6700", "#bf3989"];
const sources = new Map();  // address -> {name, series, charts: [{figure, metric, plot}]}

// A number on an axis: small ones are not rounded to 0.
const brief = (value) => value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function merged(old, more) {
  const metrics = {};
  for (const name of new Set([...Object.keys(old.metrics), ...Object.keys(more.metrics)]))
    metrics[name] = [
      ...(old.metrics[name] ?? Array(old.step.length).fill(null)),
      ...(more.metrics[name] ?? Array(more.step.length).fill(null)),
    ];
  return { step: [...old.step, ...more.step], metrics, evaluations: more.evaluations };
}

async function load(source) {
  const last = source.series.step.at(-1) ?? 0;
  const answer = await fetch(`${source.address}?after=${last}`);
  if (!answer.ok) return;
  source.series = merged(source.series, await answer.json());
  for (const chart of source.charts) draw(chart);
}

// [x, y…] of a metric over the sources of its figure, for uPlot: one x axis for all runs
function columns(chart) {
  const parts = chart.sources.map((source) =>
    chart.metric === "evaluation" ? evaluations(source.series.evaluations) :
      { x: source.series.step, ys: [source.series.metrics[chart.metric] ?? []] });
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  const place = new Map(x.map((step, i) => [step, i]));
  const ys = parts.flatMap((part) => part.ys.map((y) => {
    const column = Array(x.length).fill(null);
    part.x.forEach((step, i) => { column[place.get(step)] = y[i] ?? null; });
    return column;
  }));
  return [x, ...ys];
}

function evaluations(found) {
  const done = found.filter((one) => Object.values(one.settings)[0]?.reward != null);
  const of = (name) => done.map((one) => Object.values(one.settings)[0][name]);
  return { x: done.map((one) => one.step), ys: [of("reward"), of("low"), of("high")] };
}

function draw(chart) {
  const data = columns(chart), { figure, title } = chart;
  const values = data.slice(1).flat().filter((value) => value !== null);
  chart.plot?.destroy();
  figure.replaceChildren();
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption);
  if (!values.length) {
    const none = document.createElement("p");
    none.className = "quiet";
    none.textContent = chart.metric === "evaluation" ? "No evaluation is complete." : "No step has this metric.";
    figure.append(none);
    return;
  }
  figure.setAttribute("role", "group");
  figure.setAttribute("aria-label", `${title}: ${values.length} values, the last ${Number(values.at(-1).toPrecision(4))}`);
  const interval = chart.metric === "evaluation";
  const series = data.slice(1).map((_, i) => {
    const run = interval ? Math.floor(i / 3) : i, bound = interval && i % 3;
    return {
      label: `${chart.sources[run].name}${bound ? [" low", " high"][bound - 1] : ""}`,
      stroke: COLOURS[run % COLOURS.length], width: bound ? 0.7 : 1.6, dash: bound ? [4, 4] : undefined,
      points: { show: data[0].length < 40 }, spanGaps: true,
    };
  });
  const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 0.5 }, ticks: { stroke: style("--line") } };
  chart.plot = new uPlot({
    width: Math.max(200, figure.clientWidth), height: HEIGHT, scales: { x: { time: false } },
    legend: { show: chart.sources.length > 1 }, cursor: { sync: { key: "steps" } },
    axes: [axis, { ...axis, size: 58, values: (_, splits) => splits.map((one) => (one === null ? "" : brief(one))) }],
    series: [{ label: "step" }, ...series],
  }, data, figure);
  figure.onclick = () => {
    const i = chart.plot?.cursor.idx;
    if (chart.sources.length === 1 && i != null) location.href = `${chart.sources[0].address.replace(/\/series\.json$/, "")}/steps/${data[0][i]}`;
  };
}

function sourceOf(address, name) {
  if (!sources.has(address))
    sources.set(address, { address, name, series: { step: [], metrics: {}, evaluations: [] }, charts: [] });
  return sources.get(address);
}

function add(figure) {
  const among = figure.closest("[data-series]").dataset.series.split(" ");
  const names = (figure.closest("[data-names]")?.dataset.names ?? "").split(" ");
  const chart = {
    figure, metric: figure.dataset.chart, title: figure.dataset.title ?? figure.dataset.chart, plot: null,
    sources: among.map((address, i) => sourceOf(address, names[i] || figure.dataset.chart)),
  };
  for (const source of chart.sources) source.charts.push(chart);
  return chart;
}

const loadAll = () => Promise.all([...sources.values()].map(load));

document.querySelectorAll("[data-chart]").forEach(add);
await loadAll();
document.addEventListener("refreshed", loadAll);
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => { for (const source of sources.values()) source.charts.forEach(draw); }, 150);
});
const known = document.getElementById("metrics");
if (known && !known.children.length) {
  const names = new Set([...sources.values()].flatMap((source) => Object.keys(source.series.metrics)));
  for (const name of [...names].sort()) known.append(new Option("", name));
}
const another = document.getElementById("another"), others = document.getElementById("others");
another?.addEventListener("change", () => {
  const metric = another.value.trim();
  if (!metric || [...others.children].some((one) => one.dataset.chart === metric)) return;
  const figure = document.createElement("figure");
  figure.dataset.chart = metric;
  others.prepend(figure);
  draw(add(figure));
  another.value = "";
});
