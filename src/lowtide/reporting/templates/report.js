// Draws the page from the JSON in #profile (written by embed.py). No dependencies.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("profile").textContent);
  const { categories, phases } = page;
  const profiles = page.profiles.map(unpack);
  const PLOT = { left: 66, right: 8, top: 22, bottom: 34 }; // report.css places the cursor by top and bottom
  const OPTIMIZER_SHARE = 0.15; // of a timeline's width, at most
  const NAMED = 8; // tensors named in the inspector
  const ROWS = 100; // saved tensors shown before "show all"

  // ---------------------------------------------------------------- data

  function unpack(raw) {
    const text = (column) => column.map((i) => (Array.isArray(i) ? i.map((j) => raw.strings[j]) : raw.strings[i]));
    const live = raw.live.map((differences) => {
      let sum = 0;
      return Float64Array.from(differences, (d) => (sum += d));
    });
    const { ops, storages, modules, saved } = raw;
    for (const key of ["name", "module", "source"]) ops[key] = text(ops[key]);
    for (const key of ["label", "module"]) storages[key] = text(storages[key]);
    for (const key of ["path", "type"]) modules[key] = text(modules[key]);
    for (const key of ["dtype", "made_by", "made_in", "needed_by", "needed_in", "source"]) saved[key] = text(saved[key]);
    return { ...raw, live, count: ops.name.length };
  }

  function rowsOf(columns) {
    const keys = Object.keys(columns);
    return columns[keys[0]].map((_, i) => Object.fromEntries(keys.map((key) => [key, columns[key][i]])));
  }

  // ---------------------------------------------------------------- words

  const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

  function size(bytes) {
    for (const [unit, scale] of UNITS) {
      const n = bytes / scale;
      if (n >= 1) return `${n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${unit}`;
    }
    return `${bytes} B`;
  }

  function clock(seconds) {
    if (seconds === null) return "–";
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      const n = seconds / scale;
      if (n >= 1 || unit === "µs") return `${n.toFixed(n < 10 ? 2 : n < 100 ? 1 : 0)} ${unit}`;
    }
  }

  const shortOp = (name) => name.replace("::", ".").replace(/^aten\./, "").replace(/\.[^.]*$/, "");
  const shortSource = (source) => source.split("/").slice(-2).join("/");

  // Text is always set as text: names from the user's code are never read as HTML.
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  }

  const swatch = (category) => el("i", { class: "swatch", style: `background:${categories[category].color}` });
  const gauge = (share, color) =>
    el("span", { class: "gauge" }, el("i", { style: `width:${(100 * share).toFixed(1)}%;background:${color}` }));

  // ---------------------------------------------------------------- theme

  const root = document.documentElement;
  const redraws = [];

  function setTheme(theme) {
    root.dataset.theme = theme;
    redraws.forEach((redraw) => redraw());
  }

  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    history.replaceState(null, "", `#${theme}`); // a reload or a shared link keeps the choice
    setTheme(theme);
  });
  addEventListener("hashchange", () => /^#(dark|light)$/.test(location.hash) && setTheme(location.hash.slice(1)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));

  // ---------------------------------------------------------------- timeline

  function timeline(box) {
    const profile = profiles[box.dataset.profile];
    const { live, ops, count } = profile;
    const find = (selector) => box.querySelector(selector);
    const [stage, canvas, cursor, range] = [".stage", "canvas", ".cursor", ".range"].map(find);
    if (!count) return;
    const present = categories.map((_, c) => c).filter((c) => live[c].some((bytes) => bytes > 0));
    const shown = new Set(present);
    let view = [0, count]; // in ops; fractions are fine
    let chosen = profile.peak_op;
    let dragFrom = null;
    let width = 0;
    let height = 0;

    // Where each op starts on the axis: by count or by seconds. The optimizer has a scale of its own, so that its many
    // small ops take no more than a share of the width.
    const stepping = ops.phase.map((phase) => phases[phase].name === "optimizer");
    let [axis, own] = ["ops", false];
    let starts = [];
    function layOut() {
      const weights = ops.seconds.map((seconds) => (axis === "ops" ? 1 : seconds || 0));
      const [rest, optimizer] = [false, true].map((which) =>
        weights.reduce((sum, weight, op) => sum + (stepping[op] === which ? weight : 0), 0));
      own = rest > 0 && optimizer > OPTIMIZER_SHARE * (rest + optimizer);
      const factor = own ? (OPTIMIZER_SHARE * rest) / ((1 - OPTIMIZER_SHARE) * optimizer) : 1;
      starts = [0];
      weights.forEach((weight, op) => starts.push(starts[op] + weight * (stepping[op] ? factor : 1)));
    }
    const place = (op) => {
      const whole = Math.max(0, Math.min(count - 1, Math.floor(op)));
      return starts[whole] + (op - whole) * (starts[whole + 1] - starts[whole]);
    };
    const atPlace = (wanted) => {
      let [low, high] = [0, count]; // the last op that starts at or before it
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (starts[middle] <= wanted) low = middle;
        else high = middle;
      }
      return low + (wanted - starts[low]) / (starts[low + 1] - starts[low] || 1);
    };
    const plotWidth = () => width - PLOT.left - PLOT.right;
    const shownPlaces = () => place(view[1]) - place(view[0]) || 1;
    const toX = (op) => PLOT.left + ((place(op) - place(view[0])) / shownPlaces()) * plotWidth();
    const toOp = (x) => atPlace(place(view[0]) + ((x - PLOT.left) / plotWidth()) * shownPlaces());
    layOut();
    const heightOf = (op) => present.reduce((sum, c) => sum + (shown.has(c) ? live[c][op] : 0), 0);

    function draw() {
      ({ clientWidth: width, clientHeight: height } = stage);
      const ratio = devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const style = getComputedStyle(root);
      const color = (name) => style.getPropertyValue(name);
      pen.font = `12px ${color("--sans")}`;

      let top = shown.size === present.length && box.dataset.top ? Number(box.dataset.top) : 0;
      if (!top) for (let op = 0; op < count; op++) top = Math.max(top, heightOf(op));
      top = top * 1.04 || 1;
      const base = height - PLOT.bottom;
      const toY = (bytes) => base - (bytes / top) * (base - PLOT.top);

      pen.textAlign = "right";
      pen.textBaseline = "middle";
      const ticks = scale(top);
      for (const tick of ticks) {
        pen.fillStyle = color("--grid");
        pen.fillRect(PLOT.left, Math.round(toY(tick.bytes)), plotWidth(), 1);
        pen.fillStyle = color("--muted");
        pen.fillText(tick.label, PLOT.left - 8, toY(tick.bytes));
      }

      // One column per device pixel, drawn at the highest of the ops that share it: the peak is never lost.
      const step = 1 / ratio;
      for (let x = PLOT.left; x < width - PLOT.right; x += step) {
        const first = Math.max(0, Math.floor(toOp(x)));
        const end = Math.min(count, Math.max(first + 1, Math.floor(toOp(x + step))));
        let op = first;
        for (let other = first + 1, most = heightOf(first); other < end; other++) {
          const bytes = heightOf(other);
          if (bytes > most) [op, most] = [other, bytes];
        }
        let sum = 0;
        for (const c of present) {
          if (!shown.has(c) || !live[c][op]) continue;
          const from = toY(sum);
          sum += live[c][op];
          pen.fillStyle = categories[c].color;
          pen.fillRect(x, toY(sum), step, from - toY(sum));
        }
      }

      phaseMarks(pen, color, base);
      opTicks(pen, color, base);
      peakMark(pen, color, toY);
      if (box.dataset.mark) levelMark(pen, color, toY, Number(box.dataset.mark));
      find("[data-action=reset]").disabled = view[0] === 0 && view[1] === count;
      point();
    }

    function phaseMarks(pen, color, base) {
      pen.textAlign = "left";
      let free = PLOT.left; // names that would run into each other are left out
      for (let start = 0, end; start < count; start = end) {
        end = start + 1;
        while (end < count && ops.phase[end] === ops.phase[start]) end++;
        const { name: phase, color: phaseColor } = phases[ops.phase[start]];
        const name = own && stepping[start] ? `${phase}, own scale` : phase;
        const [left, right] = [Math.max(toX(start), PLOT.left), Math.min(toX(end), width - PLOT.right)];
        if (right <= left) continue;
        pen.fillStyle = phaseColor;
        pen.fillRect(left, base + 1, right - left, 4);
        if (start > view[0]) {
          pen.fillStyle = color("--muted");
          for (let y = PLOT.top - 6; y < base; y += 6) pen.fillRect(Math.round(left), y, 1, 3);
        }
        const room = pen.measureText(name).width;
        const at = Math.min(left + 5, width - PLOT.right - room);
        if (at >= free && (right - left > 14 || end === count)) {
          pen.fillStyle = color("--muted");
          pen.fillText(name, at, 8);
          free = at + room + 8;
        }
      }
      for (let x = Math.floor(view[0]); x < view[1]; x++) {
        if (!ops.recompute[x]) continue;
        pen.fillStyle = color("--text"); // recomputed ops, under their phase
        pen.fillRect(toX(x), base + 6, Math.max(1, toX(x + 1) - toX(x)), 2);
      }
    }

    function opTicks(pen, color, base) {
      pen.textAlign = "center";
      pen.fillStyle = color("--muted");
      if (axis === "seconds") return secondTicks(pen, base);
      const end = own && view[0] < stepping.indexOf(true) ? Math.min(view[1], stepping.indexOf(true)) : view[1];
      const gap = nice((end - view[0]) / Math.max(2, plotWidth() / 110));
      let free = 0; // labels that would run into each other are left out
      for (let op = Math.ceil(view[0] / gap) * gap; op < view[1]; op += gap) {
        const label = op === 0 ? "op 0" : op.toLocaleString("en");
        const room = pen.measureText(label).width / 2;
        const x = Math.max(toX(op), PLOT.left + room);
        if (x - room < free || x + room >= width) continue;
        pen.fillText(label, x, base + 19);
        free = x + room + 10;
      }
    }

    // Seconds since the step began, up to the optimizer where that has its own scale.
    function secondTicks(pen, base) {
      const end = own ? Math.min(place(view[1]), starts[stepping.indexOf(true)]) : place(view[1]);
      const gap = roundUp(shownPlaces() / Math.max(2, plotWidth() / 110));
      for (let n = Math.ceil(place(view[0]) / gap); n * gap <= end; n++) {
        const x = PLOT.left + ((n * gap - place(view[0])) / shownPlaces()) * plotWidth();
        const label = n ? clock(n * gap) : "0 s";
        const room = pen.measureText(label).width / 2;
        if (x + room < width) pen.fillText(label, Math.max(x, PLOT.left + room), base + 19);
      }
    }

    function peakMark(pen, color, toY) {
      const x = toX(profile.peak_op + 0.5);
      if (shown.size !== present.length || x < PLOT.left || x > width - PLOT.right) return;
      const y = toY(profile.peak_bytes) - 2;
      pen.fillStyle = color("--text");
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x - 5, y - 8);
      pen.lineTo(x + 5, y - 8);
      pen.fill();
    }

    // A level to compare with: the peak before a change.
    function levelMark(pen, color, toY, bytes) {
      const y = Math.round(toY(bytes));
      if (y < PLOT.top) return;
      pen.fillStyle = color("--muted");
      for (let x = PLOT.left; x < width - PLOT.right; x += 7) pen.fillRect(x, y, 4, 1);
      pen.textAlign = "left";
      pen.fillText(`peak before, ${size(bytes)}`, PLOT.left + 6, y + 10);
    }

    function point() {
      const x = toX(chosen + 0.5);
      cursor.hidden = x < PLOT.left || x > width - PLOT.right;
      cursor.style.left = `${x}px`;
    }

    function choose(op) {
      chosen = Math.max(0, Math.min(count - 1, Math.floor(op)));
      point();
      inspect(profile, chosen, find(".inspector"));
      stage.setAttribute("aria-valuenow", chosen);
      const total = size(present.reduce((sum, c) => sum + live[c][chosen], 0));
      stage.setAttribute("aria-valuetext", `op ${chosen}, ${shortOp(ops.name[chosen])} in ${ops.module[chosen] || "the model"}, ${total}`);
    }

    function look(start, end) {
      const span = Math.max(Math.min(10, count), Math.min(count, end - start));
      start = Math.max(0, Math.min(count - span, start));
      view = [start, start + span];
      draw();
    }

    const zoom = (factor, around) =>
      look(around - (around - view[0]) * factor, around + (view[1] - around) * factor);

    stage.addEventListener("wheel", (event) => {
      const whole = view[0] === 0 && view[1] === count;
      if (whole && (event.deltaY > 0 || event.shiftKey)) return; // nothing to zoom out of: let the page scroll
      event.preventDefault();
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const shift = (sideways / plotWidth()) * (view[1] - view[0]);
        look(view[0] + shift, view[1] + shift);
      } else zoom(Math.exp(event.deltaY * 0.002), toOp(event.offsetX));
    }, { passive: false });

    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      dragFrom = event.offsetX;
      stage.setPointerCapture(event.pointerId);
    });
    stage.addEventListener("pointermove", (event) => {
      if (dragFrom === null) return choose(toOp(event.offsetX));
      range.hidden = Math.abs(event.offsetX - dragFrom) < 4;
      range.style.left = `${Math.min(event.offsetX, dragFrom)}px`;
      range.style.width = `${Math.abs(event.offsetX - dragFrom)}px`;
    });
    stage.addEventListener("pointerup", (event) => {
      if (dragFrom !== null && !range.hidden) {
        const [a, b] = [toOp(dragFrom), toOp(event.offsetX)].sort((p, q) => p - q);
        look(Math.max(0, a), Math.min(count, b));
      } else choose(toOp(event.offsetX));
      dragFrom = null;
      range.hidden = true;
    });
    stage.addEventListener("dblclick", () => look(0, count));
    stage.addEventListener("keydown", (event) => {
      const page = Math.ceil((view[1] - view[0]) / 10);
      const keys = {
        ArrowLeft: () => choose(chosen - 1), ArrowRight: () => choose(chosen + 1),
        PageUp: () => choose(chosen - page), PageDown: () => choose(chosen + page),
        Home: () => choose(0), End: () => choose(count - 1), p: () => choose(profile.peak_op),
        "+": () => zoom(0.7, chosen), "-": () => zoom(1 / 0.7, chosen), 0: () => look(0, count),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
      if (chosen < view[0] || chosen >= view[1]) look(chosen - (view[1] - view[0]) / 2, chosen + (view[1] - view[0]) / 2);
    });
    find("[data-action=peak]").addEventListener("click", () => {
      choose(profile.peak_op);
      const span = Math.min(view[1] - view[0], Math.max(60, count / 20));
      look(chosen - span / 2, chosen + span / 2);
    });
    find("[data-action=reset]").addEventListener("click", () => look(0, count));
    const axisButton = find("[data-action=axis]");
    axisButton.hidden = !ops.seconds.some((seconds) => seconds > 0);
    axisButton.addEventListener("click", () => {
      axis = axis === "ops" ? "seconds" : "ops";
      axisButton.textContent = axis === "ops" ? "By seconds" : "By ops";
      layOut();
      draw();
    });

    for (const c of present) {
      const button = el("button", { type: "button", "aria-pressed": "true" }, swatch(c), categories[c].name);
      button.addEventListener("click", () => {
        shown.has(c) ? shown.delete(c) : shown.add(c);
        button.setAttribute("aria-pressed", shown.has(c));
        draw();
      });
      find(".legend").append(button);
    }
    stage.setAttribute("aria-valuemax", count - 1);
    redraws.push(draw);
    new ResizeObserver(draw).observe(stage);
    draw();
    choose(chosen);
  }

  // To 1, 2 or 5 times a power of ten.
  const roundUp = (number) => {
    const power = 10 ** Math.floor(Math.log10(number));
    return power * ([1, 2, 5].find((n) => n * power >= number) || 10);
  };
  const nice = (number) => Math.max(1, roundUp(number));

  function scale(top) {
    const [unit, bytes] = UNITS.find(([, scale]) => top >= scale) || ["B", 1];
    const gap = top / bytes < 5 ? Math.max(0.1, nice((top / bytes / 6) * 10) / 10) : nice(top / bytes / 6);
    const ticks = [];
    for (let i = 0; i * gap * bytes <= top; i++)
      ticks.push({ bytes: i * gap * bytes, label: i ? `${+(i * gap).toFixed(1)} ${unit}` : "0" });
    return ticks;
  }

  // Storages alive while an op runs, largest first: they are sorted already.
  function inspect(profile, op, panel) {
    const { ops, storages, live } = profile;
    const named = [];
    let others = 0;
    let rest = 0;
    for (let i = 0; i < storages.bytes.length; i++) {
      if (storages.birth[i] > op || op >= storages.death[i]) continue;
      const row = { bytes: storages.bytes[i], category: storages.category[i], label: storages.label[i], module: storages.module[i] };
      if (named.length < NAMED) named.push(row);
      else [others, rest] = [others + 1, rest + row.bytes];
    }
    if (ops.workspace[op]) {
      const category = categories.findIndex((c) => c.name === "workspace");
      named.push({ bytes: ops.workspace[op], category, label: "workspace of this kernel", module: "" });
      named.sort((a, b) => b.bytes - a.bytes);
    }
    const total = live.reduce((sum, category) => sum + category[op], 0);
    const phase = phases[ops.phase[op]].name + (ops.recompute[op] ? ", recomputed" : "");
    const time = ops.seconds[op] === null ? "" : `, ${clock(ops.seconds[op])}`;
    panel.replaceChildren(
      el("h3", {}, op === profile.peak_op ? `At the peak, op ${op.toLocaleString("en")}` : `Op ${op.toLocaleString("en")}`),
      el("p", { class: "op", title: ops.name[op] }, shortOp(ops.name[op])),
      el("p", { class: "where", title: ops.source[op] }, el("code", {}, ops.module[op] || "the model"), `, ${phase}${time}`),
      el("p", { class: "where" }, shortSource(ops.source[op])),
      el("p", { class: "total" }, el("b", {}, size(total)), el("span", { class: "muted" }, "allocated")),
      el("ol", {}, ...named.map((row) =>
        el("li", { title: `${row.label} ${row.module}` },
          swatch(row.category),
          el("span", {}, row.label, row.module && !row.label.startsWith(row.module) ? el("small", {}, row.module) : null),
          el("b", {}, size(row.bytes))))),
      others ? el("p", { class: "where" }, `and ${others.toLocaleString("en")} more, ${size(rest)}`) : "",
    );
  }

  // ---------------------------------------------------------------- tables

  // A header whose buttons sort; `order` is { key, down } and is kept by the caller.
  function header(columns, order, changed) {
    return el("thead", {}, el("tr", {}, ...columns.map((column) =>
      el("th", {
        scope: "col",
        class: column.number ? "number" : null,
        "aria-sort": order.key === column.key ? (order.down ? "descending" : "ascending") : null,
      }, el("button", {
        type: "button",
        "data-key": column.key,
        onclick: () => {
          order.down = order.key === column.key ? !order.down : Boolean(column.number);
          order.key = column.key;
          changed();
        },
      }, column.title)))));
  }

  function setTable(table, head, body) {
    const key = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    table.replaceChildren(head, body);
    if (key) [...table.querySelectorAll("[data-key]")].find((node) => node.dataset.key === key)?.focus();
  }

  const compare = (key, down) => (a, b) => {
    const sign = typeof a[key] === "string" ? a[key].localeCompare(b[key]) : a[key] - b[key];
    return down ? -sign : sign;
  };

  function moduleTree(section) {
    const rows = rowsOf(profiles[section.dataset.profile].modules);
    const byPath = new Map(rows.map((row) => [row.path, row]));
    for (const row of rows) row.children = [];
    const tops = [];
    for (const [i, row] of rows.entries()) {
      let above = row.path;
      row.place = i;
      do above = above.slice(0, Math.max(0, above.lastIndexOf("."))); while (above && !byPath.has(above));
      const parent = row.path ? byPath.get(above) : null;
      row.name = above ? row.path.slice(above.length + 1) : row.path || "(model)";
      (parent ? parent.children : tops).push(row);
    }
    const columns = [
      { key: "place", title: "Module" },
      { key: "type", title: "Type" },
      { key: "parameters", title: "Parameters", number: true, color: "parameter" },
      { key: "saved", title: "Saved", number: true, color: "activation" },
      { key: "peak", title: "At peak", number: true, color: "temporary" },
    ];
    if (rows.some((row) => row.seconds)) columns.push({ key: "seconds", title: "Seconds", number: true });
    const most = Object.fromEntries(columns.map(({ key }) => [key, Math.max(...tops.map((row) => row[key] || 0), 1e-12)]));
    const order = { key: "place", down: false };
    const open = new Set();

    // At first: the heaviest branches, about a screenful.
    const queue = [...tops];
    for (let lines = tops.length; queue.length && lines < 18;) {
      queue.sort((a, b) => Math.max(b.peak, b.saved) - Math.max(a.peak, a.saved));
      const row = queue.shift();
      if (!row.children.length || (lines > 5 && lines + row.children.length > 40)) continue;
      open.add(row);
      lines += row.children.length;
      queue.push(...row.children);
    }

    const cell = (row, { key, number, color }) => {
      if (!number) return el("td", { class: "muted" }, row[key]);
      if (!row[key]) return el("td", { class: "number muted" }, "·");
      const shade = color ? categories.find((c) => c.name === color).color : "var(--muted)";
      return el("td", { class: "number" }, key === "seconds" ? clock(row[key]) : size(row[key]), gauge(row[key] / most[key], shade));
    };

    function* lines(siblings, depth) {
      for (const row of [...siblings].sort(compare(order.key, order.down))) {
        const toggle = row.children.length
          ? el("button", {
              type: "button",
              "data-key": `row ${row.path}`,
              "aria-expanded": String(open.has(row)),
              "aria-label": `${row.name}: modules inside`,
              onclick: () => { open.has(row) ? open.delete(row) : open.add(row); render(); },
            }, open.has(row) ? "▾" : "▸")
          : el("span", { class: "leaf" });
        const name = el("th", { scope: "row", style: `padding-left:${4 + 18 * depth}px`, title: row.path }, toggle, el("code", {}, row.name));
        yield el("tr", {}, name, ...columns.slice(1).map((column) => cell(row, column)));
        if (open.has(row)) yield* lines(row.children, depth + 1);
      }
    }

    function render() {
      setTable(section.querySelector("table"), header(columns, order, render), el("tbody", {}, ...lines(tops, 0)));
    }
    section.querySelector("[data-action=expand]").addEventListener("click", () => { rows.forEach((row) => open.add(row)); render(); });
    section.querySelector("[data-action=collapse]").addEventListener("click", () => { open.clear(); tops.forEach((row) => open.add(row)); render(); });
    render();
  }

  function savedTable(section) {
    const find = (selector) => section.querySelector(selector);
    const rows = rowsOf(profiles[section.dataset.profile].saved).map((row) => {
      const shape = row.shape.join("×") || "scalar";
      const made = row.made_by ? shortOp(row.made_by) : categories[row.category].name;
      const needed = row.needed_by.map(shortOp).join(", ");
      return { ...row, shape, made, needed, text: [shape, row.dtype, made, row.made_in, needed, ...row.needed_in, row.source].join(" ").toLowerCase() };
    });
    const columns = [
      { key: "bytes", title: "Size", number: true },
      { key: "shape", title: "Tensor" },
      { key: "made_in", title: "Computed in" },
      { key: "needed", title: "Read by the backward of" },
      { key: "source", title: "Source" },
    ];
    const order = { key: "bytes", down: true };
    const most = Math.max(...rows.map((row) => row.bytes), 1);
    const activation = categories.findIndex((c) => c.name === "activation");
    let limit = ROWS;

    const line = (row) => el("tr", {},
      el("td", { class: "number" }, size(row.bytes), gauge(row.bytes / most, categories[row.category].color)),
      el("td", {}, el("code", {}, row.shape), el("small", {}, row.dtype)),
      el("td", {}, el("code", {}, row.made_in || "(model)"), el("small", {}, row.made)),
      el("td", {}, el("code", {}, row.needed), el("small", {}, row.needed_in.join(", "))),
      el("td", { title: row.source }, el("code", {}, shortSource(row.source))));

    function render() {
      const words = find("input[type=search]").value.toLowerCase().split(/\s+/);
      const shown = rows.filter((row) =>
        (find("[data-all]").checked || row.category === activation) && words.every((word) => row.text.includes(word)));
      shown.sort(compare(order.key, order.down));
      const total = shown.reduce((sum, row) => sum + row.bytes, 0);
      find("[role=status]").textContent =
        `${shown.length.toLocaleString("en")} storages, ${size(total)}. A storage that several ops save is counted once.`;
      const more = find("[data-action=more]");
      more.hidden = shown.length <= limit;
      more.textContent = `Show all ${shown.length.toLocaleString("en")}`;
      setTable(find("table"), header(columns, order, render), el("tbody", {}, ...shown.slice(0, limit).map(line)));
    }
    find("input[type=search]").addEventListener("input", render);
    find("[data-all]").addEventListener("change", render);
    find("[data-action=more]").addEventListener("click", () => { limit = Infinity; render(); });
    render();
  }

  document.querySelectorAll(".timeline").forEach(timeline);
  document.querySelectorAll(".modules").forEach(moduleTree);
  document.querySelectorAll(".saved").forEach(savedTable);
})();
