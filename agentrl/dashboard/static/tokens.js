// The token view: only the lines in sight are in the page, so that 128k tokens scroll smoothly.
"use strict";
(async () => {
  const LINE_PX = 22, COLUMNS = 100, MARGIN = 3, SHADES = 8;
  const source = document.getElementById("data"), address = source?.dataset.src;
  const data = address ? await (await fetch(address)).json() : JSON.parse(source.textContent);
  const [pathMenu, factMenu, view, lines, about, legend] =
    ["path", "fact", "view", "lines", "about", "legend"].map((id) => document.getElementById(id));
  if (!view) return;
  // name -> how a token's value is read; categories have a colour each, numbers a shade
  const GAP = "|engine − trainer|";
  const FACTS = ["loss reason", GAP, "logprobs", "versions", "ages", "turn_ids", ...data.facts];
  const CATEGORIES = new Set(["loss reason", "versions", "ages", "turn_ids", "clipped", "capped", "kept"]);
  const LABELS = { logprobs: "engine's logprob", logprob: "trainer's logprob", turn_ids: "call", ages: "age", versions: "version" };
  // An array of the data: base64 of little-endian int32 or float32, in which NaN means that nothing was measured.
  function array({ type, base64 }) {
    let bytes;
    if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(base64);
    else bytes = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
    return type === "int32" ? new Int32Array(bytes.buffer) : new Float32Array(bytes.buffer);
  }
  for (const one of data.paths) for (const [name, found] of Object.entries(one.arrays)) one[name] = array(found);
  let path, rows, rowOf, reasons, chosen = 0, scale;
  const drawn = new Map();  // line number -> its element

  const sampled = (i) => path.turn_ids[i] >= 0;
  function value(name, i) {
    if (name === "loss reason") return reasons[i];
    if (name === GAP) return Number.isNaN(path.logprob[i]) ? null : Math.abs(path.logprobs[i] - path.logprob[i]);
    if (name === "logprobs" || name === "versions" || name === "turn_ids") return sampled(i) ? path[name][i] : null;
    if (name === "ages") return path.ages[i] < 0 ? null : path.ages[i];
    return Number.isNaN(path[name][i]) ? null : path[name][i];
  }
  const text = (i) => data.texts[path.input_ids[i]];
  const shown = (found) => found === null ? "–" : typeof found === "number" && !Number.isInteger(found) ? found.toPrecision(4) : String(found);

  // The engine's likeliest tokens at a place, as pairs of a name and a text; none where no call recorded them.
  function likeliest(i) {
    const call = path.likeliest.find((one) => i >= one.start && i < one.start + one.ids.length);
    if (!call) return [];
    const logprobs = call.logprobs[i - call.start], ids = call.ids[i - call.start].filter((id) => id in data.texts);
    return ids.map((id, k) => [`likeliest ${k + 1}`, `${JSON.stringify(data.texts[id])} ${shown(logprobs[k])}`]);
  }

  function open(number) {
    path = data.paths[number];
    reasons = new Array(path.input_ids.length);
    for (const [reason, start, end] of path.reasons) reasons.fill(reason, start, end);
    rows = [[]];
    rowOf = new Int32Array(path.input_ids.length);
    let width = 0;
    path.input_ids.forEach((_, i) => {
      const one = text(i);
      if (width + one.length > COLUMNS && width) { rows.push([]); width = 0; }
      rows.at(-1).push(i);
      rowOf[i] = rows.length - 1;
      width += one.length;
      if (one.includes("\n")) { rows.push([]); width = 0; }
    });
    lines.style.height = `${rows.length * LINE_PX}px`;
    view.style.height = `min(26rem, ${(rows.length + 1) * LINE_PX}px)`;
    view.scrollTop = 0;
    choose(Math.max(0, path.turn_ids.findIndex((turn) => turn >= 0)), true);
    recolour();
  }

  function recolour() {
    const name = factMenu.value, found = Array.from(path.input_ids, (_, i) => value(name, i));
    legend.replaceChildren();
    if (CATEGORIES.has(name)) {
      const kinds = [...new Set(found.filter((one) => one !== null))].sort((a, b) => (a > b) - (a < b));
      scale = (one) => one === null ? "none" : `k${kinds.indexOf(one) % SHADES}`;
      kinds.slice(0, 40).forEach((kind) => mark(`${shown(kind)}`, scale(kind)));
    } else {
      const numbers = found.filter((one) => one !== null).sort((a, b) => a - b);
      const low = numbers[0], high = numbers.at(-1), width = high - low || 1;
      scale = (one) => one === null ? "none" : `s${Math.min(SHADES - 1, Math.floor((one - low) / width * SHADES))}`;
      for (let s = 0; numbers.length && s < SHADES; s++) mark(shown(low + width * s / SHADES), `s${s}`);
    }
    mark("not measured", "none");
    draw();
  }

  function mark(label, kind) {
    const span = document.createElement("span");
    span.textContent = label;
    span.className = kind;
    legend.append(span);
  }

  // Draws the lines in sight. Lines that were in sight before stay, unless `again`.
  function draw(again = true) {
    const first = Math.max(0, Math.floor(view.scrollTop / LINE_PX) - MARGIN);
    const last = Math.min(rows.length, Math.ceil((view.scrollTop + view.clientHeight) / LINE_PX) + MARGIN);
    for (const [r, line] of drawn)
      if (again || r < first || r >= last) { line.remove(); drawn.delete(r); }
    const made = document.createDocumentFragment(), name = factMenu.value;
    for (let r = first; r < last; r++) {
      if (drawn.has(r)) continue;
      const line = document.createElement("div");
      line.className = "line";
      line.style.top = `${r * LINE_PX}px`;
      for (const i of rows[r]) {
        const span = document.createElement("span");
        span.className = `token ${scale(value(name, i))}${i === chosen ? " chosen" : ""}`;
        span.textContent = text(i).replaceAll("\n", "⏎") || "∅";
        span.dataset.i = i;
        line.append(span);
      }
      drawn.set(r, line);
      made.append(line);
    }
    lines.append(made);
  }

  function choose(i, scroll = false) {
    chosen = Math.min(Math.max(i, 0), path.input_ids.length - 1);
    about.replaceChildren();
    const facts = [["token", chosen], ["id", path.input_ids[chosen]], ["text", JSON.stringify(text(chosen))]];
    const measured = FACTS.map((name) => [LABELS[name] ?? name, value(name, chosen)]);
    for (const [name, found] of [...facts, ...measured, ...likeliest(chosen)]) {
      const pair = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name.replaceAll("_", " ");
      dd.textContent = shown(found);
      pair.append(dt, dd);
      about.append(pair);
    }
    const top = rowOf[chosen] * LINE_PX;
    if (scroll && (top < view.scrollTop || top + LINE_PX > view.scrollTop + view.clientHeight))
      view.scrollTop = top - view.clientHeight / 2;
  }

  function worst() {
    if (CATEGORIES.has(factMenu.value)) { factMenu.value = GAP; recolour(); }  // categories have no largest
    const name = factMenu.value;
    let found = -1, most = -Infinity;
    path.input_ids.forEach((_, i) => {
      const one = value(name, i);
      if (typeof one === "number" && Math.abs(one) > most) { most = Math.abs(one); found = i; }
    });
    if (found >= 0) { choose(found, true); draw(); view.focus(); }
  }

  data.paths.forEach((one, i) => {
    const step = one.step === null ? "" : `, step ${one.step}`;
    pathMenu.add(new Option(`${one.trajectory_id} (${one.state}${one.reason ? `: ${one.reason}` : ""}${step})`, i));
  });
  FACTS.forEach((name) => factMenu.add(new Option((LABELS[name] ?? name).replaceAll("_", " "), name)));
  let waiting = false;
  view.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(false); });
  });
  view.addEventListener("click", (event) => {
    const span = event.target.closest("[data-i]");
    if (span) { choose(Number(span.dataset.i)); draw(); }
  });
  view.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const line = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) choose(chosen + by, true);
    else if (line) choose(rows[Math.min(Math.max(rowOf[chosen] + line, 0), rows.length - 1)][0] ?? chosen + line, true);
    else return;
    event.preventDefault();
    draw();
  });
  pathMenu.addEventListener("change", () => open(Number(pathMenu.value)));
  factMenu.addEventListener("change", recolour);
  document.getElementById("worst").addEventListener("click", worst);
  open(0);
})();
