"use strict";
// Sorts and shortens tables, and draws the prefix tree. Texts are set as text, never as markup.
(() => {
  const make = (name, classes, text) => {
    const element = document.createElement(name);
    if (classes) element.className = classes;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const DASH = "–";
  const count = (n) => (n === null ? DASH : n.toLocaleString("en-US"));
  const size = (n) => {
    if (n === null) return DASH;
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
    return `${at === 0 || n >= 100 ? n.toFixed(0) : n.toFixed(1)} ${units[at]}`;
  };
  const share = (part, whole) => {
    if (!whole) return DASH;
    const percent = (100 * part) / whole;
    return percent > 0 && percent < 1 ? "< 1 %" : `${percent.toFixed(0)} %`;
  };
  const things = (n, one) => `${count(n)} ${n === 1 ? one : one + (one.endsWith("x") ? "es" : "s")}`;
  const span = (s) => {
    for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
      if (s >= length) return `${Math.floor(s / length)} ${unit}`;
    }
    return "0 s";
  };

  // Tables

  const sortTable = (table, column, button) => {
    const head = button.parentElement;
    const isNumber = head.classList.contains("num");
    const before = head.getAttribute("aria-sort");
    const order = before === null ? (isNumber ? "descending" : "ascending")
      : before === "ascending" ? "descending" : "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const body = table.tBodies[0];
    const sign = order === "ascending" ? 1 : -1;
    const keyed = [...body.rows].map((row) => {
      const cell = row.cells[column];
      const key = cell.dataset.sort === undefined ? cell.textContent : cell.dataset.sort;
      return [isNumber ? Number(key) : key.toLowerCase(), row];
    });
    keyed.sort(([a], [b]) => (a < b ? -sign : a > b ? sign : 0));
    body.append(...keyed.map(([, row]) => row));
  };

  for (const holder of document.querySelectorAll(".table")) {
    const table = holder.querySelector("table");
    const open = Number(holder.dataset.open);
    const rows = () => [...table.tBodies[0].rows];
    const many = rows().length > open;
    const controls = make("div", "controls");
    const more = make("button", "", "");
    let all = !many;
    const cut = () => {
      rows().forEach((row, at) => { row.hidden = !all && at >= open; });
      more.textContent = all ? `Show ${open}` : `Show all ${count(rows().length)}`;
    };
    table.querySelectorAll("th button").forEach((button, column) => {
      button.addEventListener("click", () => { sortTable(table, column, button); cut(); });
    });
    if (!many) continue;
    more.type = "button";
    more.addEventListener("click", () => { all = !all; cut(); });
    controls.append(more);
    holder.append(controls);
    cut();
  }

  // The tree

  const data = JSON.parse(document.getElementById("tree-data").textContent);
  const picture = document.getElementById("icicle");
  const detail = document.getElementById("tree-detail");
  const legend = document.getElementById("tree-legend");
  const path = document.getElementById("tree-path");
  const byWidth = document.getElementById("tree-width");
  const byColour = document.getElementById("tree-colour");
  const find = document.getElementById("tree-find");
  const HIGH = 28;

  const everything = { kind: "all", name: "Everything", children: [], level: 0, up: null };
  const spaces = new Map();
  const nodes = new Map();
  for (const [number, space] of data.spaces.entries()) {
    spaces.set(space.name, {
      kind: "space", name: space.model || `unknown ${space.name.slice(0, 8)}`, space, number, children: [], up: everything,
    });
  }
  for (const raw of data.nodes) {
    const node = { kind: raw.other ? "other" : "run", raw, children: [] };
    let up = raw.parent === null ? undefined : nodes.get(raw.parent);
    if (!up) {
      if (!spaces.has(raw.space)) {
        const space = { name: raw.space, model: null, tenant: null, known: false };
        spaces.set(raw.space, { kind: "space", name: `unknown ${raw.space.slice(0, 8)}`, space, number: spaces.size, children: [], up: everything });
      }
      up = spaces.get(raw.space);
    }
    node.up = up;
    node.home = spaces.get(raw.space);
    node.name = raw.text || (raw.other ? raw.label || "smaller ones" : raw.hash.slice(0, 8));
    up.children.push(node);
    nodes.set(raw.id, node);
  }
  const named = new Map();
  for (const space of spaces.values()) named.set(space.name, (named.get(space.name) || 0) + 1);
  for (const space of spaces.values()) {
    space.home = space;
    // Namespaces of one model are named by their tenant or their hash.
    if (named.get(space.name) > 1) space.name += ` · ${space.space.tenant || space.space.name.slice(0, 8)}`;
    if (space.children.length) everything.children.push(space);
  }
  if (!everything.children.length) {
    picture.append(make("p", "empty", "No prefixes are stored, or the audit did not reach them."));
    return;
  }
  document.querySelector(".tools").hidden = false;

  const order = [];   // parents before their children
  for (const left = [everything]; left.length;) {
    const node = left.pop();
    node.level = node.up ? node.up.level + 1 : 0;
    order.push(node);
    for (let at = node.children.length - 1; at >= 0; at -= 1) left.push(node.children[at]);
  }
  for (let at = order.length - 1; at >= 0; at -= 1) {
    const node = order[at];
    const below = (what) => node.children.reduce((sum, child) => sum + child[what], 0);
    const raw = node.raw;
    node.bytes = (raw ? raw.bytes : 0) + below("bytes");
    node.chunks = (raw ? raw.chunks : 0) + below("chunks");
    node.leaves = raw ? Math.max(raw.leaves, below("leaves")) : below("leaves");
    node.hits = (raw ? raw.hits || 0 : 0) + below("hits");
    node.knows = (raw ? raw.hits !== null : false) || node.children.some((child) => child.knows);
  }
  const mostHits = Math.max(1, ...order.map((node) => (node.raw && node.raw.top) || 0));

  const heat = (node) => {
    const hits = node.raw.top === null ? node.raw.hits : node.raw.top;
    if (hits === null) return "hx";
    return hits === 0 ? "h0" : `h${Math.min(7, 1 + Math.floor((6.99 * Math.log(hits)) / Math.log(mostHits + 1)))}`;
  };
  const AGES = [3600, 6 * 3600, 86400, 3 * 86400, 7 * 86400, 30 * 86400];
  const freshness = (node) => {
    if (node.raw.used === null) return node.raw.hits === null ? "hx" : "h0";
    const age = data.made - node.raw.used;
    const at = AGES.findIndex((limit) => age < limit);
    return `h${at < 0 ? 1 : 7 - at}`;
  };
  const paint = (node) => {
    if (byColour.value === "space" && node.home) return `s${node.home.number % 8}`;
    if (!node.raw) return "k-all";
    return byColour.value === "used" ? freshness(node) : heat(node);
  };

  const layOut = () => {
    const what = byWidth.value;
    for (const node of order) node.children.sort((a, b) => b[what] - a[what] || (a.kind === "other") - (b.kind === "other"));
    everything.x = 0;
    everything.w = 1;
    for (const node of order) {   // parents come first, whatever the order of siblings
      let x = node.x;
      for (const child of node.children) {
        child.x = x;
        child.w = node[what] ? (node.w * child[what]) / node[what] : 0;
        x += child.w;
      }
    }
  };

  const range = (raw) => `${count(raw.start)}–${count(raw.end)}`;
  const sentence = (node) => {
    const what = `${node.name}, ${size(node.bytes)}, ${things(node.chunks, "chunk")}`;
    const hits = node.knows ? `, ${things(node.hits, "hit")}` : "";
    return node.raw ? `${what}, tokens ${range(node.raw)}${hits}` : `${what}${hits}`;
  };

  let zoomed = everything, focused = everything, pointed = null;
  const within = (node) => { for (let at = zoomed; at; at = at.up) if (at === node) return true; return false; };

  const boxOf = (node) => {
    if (node.box) return node.box;
    const box = make("div", "box");
    box.setAttribute("role", "treeitem");
    box.setAttribute("aria-level", String(node.level + 1));
    box.setAttribute("aria-label", sentence(node));
    box.tabIndex = -1;
    box.style.top = `${node.level * HIGH}px`;
    box.addEventListener("click", () => { focused = node; go(node === zoomed && node.up ? node.up : node); });
    box.addEventListener("mouseenter", () => { pointed = node; tell(node); });
    box.addEventListener("focus", () => { focused = node; pointed = null; tell(node); });
    node.box = box;
    picture.append(box);
    return box;
  };

  const draw = () => {
    const pixels = picture.clientWidth || 900;
    const words = find.value.trim().toLowerCase();
    let deepest = 0;
    for (const node of order) {
      const above = within(node) && node !== zoomed;
      const x = above ? 0 : (node.x - zoomed.x) / zoomed.w;
      const w = above ? 1 : node.w / zoomed.w;
      const inside = above || (node.x >= zoomed.x - 1e-12 && node.x + node.w <= zoomed.x + zoomed.w + 1e-12 && node.level >= zoomed.level);
      if (!inside || w * pixels < 1.2) {
        if (node.box) { node.box.hidden = true; node.box.style.display = "none"; }
        continue;
      }
      const box = boxOf(node);
      box.style.display = "";
      box.hidden = false;
      box.style.left = `${100 * x}%`;
      box.style.width = `${100 * w}%`;
      const isThin = w * pixels < 34;
      box.textContent = isThin ? "" : node.raw && !node.raw.other ? `${node.name} · ${range(node.raw)}` : node.name;
      box.className = `box ${paint(node)}${above ? " above" : ""}${node.kind === "other" ? " other" : ""}${isThin ? " thin" : ""}${w * pixels < 5 ? " hair" : ""}`;
      if (words && !matches(node, words)) box.classList.add("dim");
      box.tabIndex = node === focused ? 0 : -1;
      deepest = Math.max(deepest, node.level);
    }
    if (focused.box === undefined || focused.box.hidden) { focused = zoomed; boxOf(zoomed).tabIndex = 0; }
    picture.style.height = `${(deepest + 1) * HIGH + 1}px`;
  };

  const matches = (node, words) => {
    const texts = [node.name, node.raw && node.raw.hash, node.raw && node.raw.label, node.home && node.home.space.name,
      node.home && node.home.space.model, node.home && node.home.space.tenant];
    return texts.some((text) => text && text.toLowerCase().includes(words));
  };

  const tell = (node) => {
    const rows = [];
    const raw = node.raw;
    if (raw) {
      rows.push(["Tokens", range(raw)]);
      if (raw.other) rows.push(["Stands for", things(raw.folded, "prefix")]);
      rows.push([node.children.length ? "This box" : "Size", size(raw.bytes)], ["Chunks", count(raw.chunks)]);
    }
    if (node.children.length) {
      rows.push([raw ? "With all boxes below" : "Size", size(node.bytes)]);
      if (!raw) rows.push(["Chunks", count(node.chunks)]);
    }
    rows.push(["Share of the store", share(node.bytes, everything.bytes)]);
    rows.push(["Prompts ending here or below", count(node.leaves)]);
    rows.push(["Hits", raw ? count(raw.hits) : node.knows ? count(node.hits) : DASH]);
    if (raw) {
      rows.push(["Last used", raw.used === null ? DASH : `${span(Math.max(0, data.made - raw.used))} ago`]);
      if (!raw.other) rows.push(["Continuations", count(raw.ways)]);
    }
    const list = make("dl");
    for (const [name, value] of rows) list.append(make("dt", "", name), make("dd", "", value));
    const home = node.home && node.home.space;
    const title = raw && !raw.other ? `Chunk ${raw.hash.slice(0, 8)}` : node.name;
    const parts = [make("h3", "", title)];
    if (home) parts.push(make("p", "sub", `${home.model || "unknown model"} · ${home.tenant || "unknown tenant"}`));
    parts.push(list);
    if (raw && raw.text) parts.push(make("blockquote", "", raw.text));
    if (raw && raw.hash) parts.push(make("p", "hash mono", raw.hash));
    else if (home) parts.push(make("p", "hash mono", home.name));
    detail.replaceChildren(...parts);
  };

  const tellLegend = () => {
    const kind = byColour.value;
    if (kind === "space") {
      const names = make("div", "names");
      for (const space of everything.children.slice(0, 8)) {
        const line = make("div");
        line.append(make("i", `s${space.number % 8}`), space.name);
        names.append(line);
      }
      const left = everything.children.length - 8;
      if (left > 0) names.append(make("div", "", `and ${count(left)} more in the same colours`));
      legend.replaceChildren(make("span", "", "Colour: namespace"), names);
      return;
    }
    const scale = make("div", "scale");
    for (let at = 0; at < 8; at += 1) scale.append(make("i", `h${at}`));
    const ends = make("div", "ends");
    const [title, low, high] = kind === "hits"
      ? ["Colour: hits of the box's most used chunk", "0", count(mostHits)]
      : ["Colour: last use", "never", "within the hour"];
    ends.append(make("span", "", low), make("span", "", high));
    legend.replaceChildren(make("span", "", title), scale, ends);
  };

  const go = (node) => {
    zoomed = node;
    const trail = [];
    for (let at = node; at; at = at.up) trail.unshift(at);
    const parts = [];
    for (const at of trail) {
      if (parts.length) parts.push(make("span", "", "›"));
      const step = make("button", "", at.name);
      step.type = "button";
      if (at === node) step.setAttribute("aria-current", "true");
      step.addEventListener("click", () => go(at));
      parts.push(step);
    }
    path.replaceChildren(...parts);
    draw();
    tell(node);
  };

  const move = (to) => {
    if (!to || !to.box || to.box.hidden) return;
    focused = to;
    draw();
    to.box.focus();
    to.box.scrollIntoView({ block: "nearest" });
  };
  picture.addEventListener("keydown", (event) => {
    const around = focused.up ? focused.up.children : [focused];
    const at = around.indexOf(focused);
    const keys = {
      ArrowDown: () => move(focused.children.find((child) => child.box && !child.box.hidden)),
      ArrowUp: () => move(focused.up),
      ArrowRight: () => move(around[at + 1]),
      ArrowLeft: () => move(around[at - 1]),
      Home: () => move(everything),
      Enter: () => { go(focused); focused.box.focus(); },
      " ": () => { go(focused); focused.box.focus(); },
      Escape: () => { if (zoomed.up) { focused = zoomed.up; go(zoomed.up); focused.box.focus(); } },
      Backspace: () => keys.Escape(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  picture.addEventListener("mouseleave", () => { pointed = null; tell(zoomed); });
  byWidth.addEventListener("change", () => { layOut(); draw(); });
  byColour.addEventListener("change", () => { tellLegend(); draw(); });
  find.addEventListener("input", draw);
  new ResizeObserver(draw).observe(picture);
  layOut();
  tellLegend();
  go(everything);
})();
