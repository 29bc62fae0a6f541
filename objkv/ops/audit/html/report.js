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

  // The tree: of each namespace the branches that the report has, and one box for what it left out.

  const data = JSON.parse(document.getElementById("tree-data").textContent);
  const picture = document.getElementById("icicle");
  const detail = document.getElementById("tree-detail");
  const legend = document.getElementById("tree-legend");
  const path = document.getElementById("tree-path");
  const HIGH = 28;

  const added = (up, name, values) => {
    const node = { name, up, level: up ? up.level + 1 : 0, home: up && up.home, children: [], ...values };
    if (up) up.children.push(node);
    return node;
  };
  const everything = added(null, "Everything", { bytes: 0, chunks: 0, leaves: 0 });
  const models = data.spaces.map((space) => space.model);
  const spaces = new Map();
  for (const space of data.spaces) {
    if (!space.chunks) continue;
    const alike = models.filter((model) => model === space.model).length > 1;
    const name = space.model || "unknown";
    const label = alike || !space.model ? `${name} · ${space.tenant || space.name.slice(0, 8)}` : name;
    const node = added(everything, label, {
      home: space, own: 0, ownChunks: 0, bytes: space.bytes, chunks: space.chunks, leaves: 0, parts: space.roots,
    });
    spaces.set(space.name, node);
    everything.bytes += space.bytes;
    everything.chunks += space.chunks;
  }
  const nodes = new Map();
  for (const raw of data.nodes) {   // parents come first
    const up = raw.parent === null ? spaces.get(raw.namespace) : nodes.get(raw.parent);
    nodes.set(raw.id, added(up, raw.hash.slice(0, 8), {
      raw, own: raw.nbytes, ownChunks: raw.chunks, bytes: raw.tree_bytes, chunks: raw.tree_chunks,
      leaves: raw.leaves, parts: raw.branches,
    }));
    if (raw.parent === null) { up.leaves += raw.leaves; everything.leaves += raw.leaves; }
  }
  for (const node of [...spaces.values(), ...nodes.values()]) {
    const rest = { bytes: node.bytes - node.own, chunks: node.chunks - node.ownChunks, leaves: node.leaves };
    const left = node.parts - node.children.length;
    for (const child of node.children) for (const what in rest) rest[what] -= child[what];
    if (rest.chunks > 0) added(node, left > 0 ? `${count(left)} smaller` : "others", { ...rest, other: true });
  }
  if (!nodes.size) {
    picture.append(make("p", "empty", "No prefixes are stored."));
    return;
  }

  const order = [];
  const place = (node, x, w) => {
    Object.assign(node, { x, w });
    order.push(node);
    node.children.sort((a, b) => Boolean(a.other) - Boolean(b.other) || b.bytes - a.bytes);
    for (const child of node.children) {
      const part = node.bytes ? (w * child.bytes) / node.bytes : 0;
      place(child, x, part);
      x += part;
    }
  };
  const mostHits = Math.max(1, ...data.nodes.map((raw) => raw.hits || 0));
  const heat = (node) => {
    if (!node.raw) return node.other ? "hx" : "k-all";
    const hits = node.raw.hits;
    if (!hits) return hits === 0 ? "h0" : "hx";
    return `h${Math.min(7, 1 + Math.floor((6.99 * Math.log(hits)) / Math.log(mostHits + 1)))}`;
  };
  const range = (raw) => `${count(raw.token_start)}–${count(raw.token_end)}`;
  const sentence = (node) => {
    const what = `${node.name}, ${size(node.bytes)}, ${things(node.chunks, "chunk")}`;
    return node.raw ? `${what}, tokens ${range(node.raw)}, ${things(node.raw.hits, "hit")}` : what;
  };

  let zoomed = everything, focused = everything;
  const within = (node) => { for (let at = zoomed; at; at = at.up) if (at === node) return true; return false; };

  const boxOf = (node) => {
    if (node.box) return node.box;
    const box = make("div", "box");
    box.setAttribute("role", "treeitem");
    box.setAttribute("aria-level", String(node.level + 1));
    box.setAttribute("aria-label", sentence(node));
    box.style.top = `${node.level * HIGH}px`;
    box.addEventListener("click", () => { focused = node; go(node === zoomed && node.up ? node.up : node); });
    box.addEventListener("mouseenter", () => tell(node));
    box.addEventListener("focus", () => { focused = node; tell(node); });
    node.box = box;
    picture.append(box);
    return box;
  };
  const draw = () => {
    const pixels = picture.clientWidth || 900;
    let deepest = 0;
    for (const node of order) {
      const above = within(node) && node !== zoomed;
      const x = above ? 0 : (node.x - zoomed.x) / zoomed.w;
      const w = above ? 1 : node.w / zoomed.w;
      const inside = above || (x >= -1e-9 && x + w <= 1 + 1e-9 && node.level >= zoomed.level);
      if (!inside || w * pixels < 1.2) {
        if (node.box) node.box.hidden = true;
        continue;
      }
      const box = boxOf(node), isThin = w * pixels < 34;
      box.hidden = false;
      box.style.left = `${100 * x}%`;
      box.style.width = `${100 * w}%`;
      box.textContent = isThin ? "" : node.raw ? `${node.name} · ${range(node.raw)}` : node.name;
      box.className = `box ${heat(node)}${above ? " above" : ""}${node.other ? " other" : ""}${isThin ? " thin" : ""}${w * pixels < 5 ? " hair" : ""}`;
      box.tabIndex = node === focused ? 0 : -1;
      deepest = Math.max(deepest, node.level);
    }
    if (!focused.box || focused.box.hidden) { focused = zoomed; boxOf(zoomed).tabIndex = 0; }
    picture.style.height = `${(deepest + 1) * HIGH + 1}px`;
  };

  const tell = (node) => {
    const raw = node.raw, home = node.home;
    const rows = [["Size", size(node.bytes)], ["Chunks", count(node.chunks)]];
    if (raw) {
      rows.unshift(["Tokens", range(raw)]);
      if (raw.branches) rows.splice(1, 0, ["This box", size(raw.nbytes)]);
    }
    rows.push(["Share of the store", share(node.bytes, everything.bytes)], ["Prompts ending here or below", count(node.leaves)]);
    if (raw) {
      rows.push(["Hits", count(raw.tree_hits)], ["Last used", raw.last_used_s === null ? DASH : `${span(Math.max(0, data.made - raw.last_used_s))} ago`]);
      rows.push(["Continuations", count(raw.branches)]);
    }
    const list = make("dl");
    for (const [name, value] of rows) list.append(make("dt", "", name), make("dd", "", value));
    const parts = [make("h3", "", raw ? `Chunk ${node.name}` : node.name)];
    if (home) parts.push(make("p", "sub", `${home.model || "unknown model"} · ${home.tenant || "unknown tenant"}`));
    parts.push(list);
    if (home) parts.push(make("p", "hash mono", raw ? raw.hash : home.name));
    detail.replaceChildren(...parts);
  };
  const go = (node) => {
    zoomed = node;
    const trail = [];
    for (let at = node; at; at = at.up) {
      const step = make("button", "", at.name), to = at;
      step.type = "button";
      if (at === node) step.setAttribute("aria-current", "true");
      step.addEventListener("click", () => go(to));
      trail.unshift(...(at.up ? [make("span", "", "›"), step] : [step]));
    }
    path.replaceChildren(...trail);
    draw();
    tell(node);
  };
  const move = (to) => {
    if (!to || !to.box || to.box.hidden) return;
    focused = to;
    draw();
    to.box.focus();
  };
  picture.addEventListener("keydown", (event) => {
    const around = focused.up ? focused.up.children : [focused];
    const zoom = (to) => { focused = to; go(to); to.box.focus(); };
    const keys = {
      ArrowDown: () => move(focused.children.find((child) => child.box && !child.box.hidden)),
      ArrowUp: () => move(focused.up),
      ArrowRight: () => move(around[around.indexOf(focused) + 1]),
      ArrowLeft: () => move(around[around.indexOf(focused) - 1]),
      Enter: () => zoom(focused),
      Escape: () => { if (zoomed.up) zoom(zoomed.up); },
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  picture.addEventListener("mouseleave", () => tell(zoomed));

  const scale = make("div", "scale"), ends = make("div", "ends");
  for (let at = 0; at < 8; at += 1) scale.append(make("i", `h${at}`));
  ends.append(make("span", "", "0"), make("span", "", count(mostHits)));
  legend.replaceChildren(make("span", "", "Colour: hits of the box's most used chunk"), scale, ends);
  new ResizeObserver(draw).observe(picture);
  place(everything, 0, 1);
  go(everything);
})();
