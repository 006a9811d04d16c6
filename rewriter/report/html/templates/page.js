"use strict";
(() => {
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  // Tables: sort by a column, filter by text and by choices.
  for (const box of document.querySelectorAll("[data-table]")) {
    const body = box.querySelector("tbody");
    const rows = [...body.rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    let sorted = "";
    const filter = box.querySelector("[data-filter]");
    const menus = [...box.querySelectorAll("[data-choice]")];
    const count = box.querySelector("[data-count]");
    const cell = (row, column) => row.cells[column].firstChild?.textContent ?? "";
    const show = () => {
      const words = (filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        const fits = words.every((word) => texts[index].includes(word)) &&
          menus.every((menu) => !menu.value || cell(row, menu.dataset.choice) === menu.value);
        row.hidden = !fits;
        shown += fits;
      });
      const part = shown === rows.length ? `${shown}` : `${shown} of ${rows.length}`;
      count.textContent = `${part} ${rows.length === 1 ? "row" : "rows"}${sorted}`;
    };
    filter?.addEventListener("input", show);
    for (const menu of menus) menu.addEventListener("change", show);
    for (const button of box.querySelectorAll("[data-sort]")) {
      button.addEventListener("click", () => {
        const head = button.closest("th");
        const numeric = "number" in button.dataset;
        const first = numeric ? "descending" : "ascending";
        const other = numeric ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const th of head.parentNode.cells) th.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", order);
        const column = Number(button.dataset.sort);
        const sign = order === "ascending" ? 1 : -1;
        const value = (row) => {
          const order = row.cells[column].dataset.order;
          return order === undefined ? cell(row, column) : Number(order);
        };
        const compare = (a, b) => {
          const left = value(a), right = value(b);
          if (left === "" || right === "") return (left === "") - (right === "");
          if (typeof left === "number" && typeof right === "number") return sign * (left - right);
          return sign * String(left).localeCompare(String(right), "en", { numeric: true });
        };
        body.append(...rows.slice().sort(compare));
        sorted = `, by ${button.textContent}, ${order}`;
        show();
      });
    }
  }

  // Commands: copy one to the clipboard.
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const code = button.parentNode.querySelector("code");
      const say = (text) => {
        button.querySelector("[data-state]").textContent = text;
        button.parentNode.querySelector("output").textContent = text;
      };
      try {
        await navigator.clipboard.writeText(code.textContent);
        say("Copied");
      } catch {
        getSelection().selectAllChildren(code);
        say("Selected");
      }
    });
  }

  // Ranges along depth: a cursor for pointer and keyboard, and zoom.
  for (const figure of document.querySelectorAll("[data-depth]")) {
    const { rows, texts } = JSON.parse(figure.querySelector(".depth-data").textContent);
    const [PLACE, NODE, TENSOR, OP, KIND, WHY, RANGE, Y, CONSTANT, ERRORS, GRAPH] = rows[0].keys();
    const field = figure.querySelector(".field");
    const plot = figure.querySelector(".data");
    const strip = figure.querySelector(".strip");
    const errors = figure.querySelector(".errors");
    const cursor = figure.querySelector(".cursor");
    const tip = figure.querySelector(".tip");
    const constants = figure.querySelector("[data-constants]");
    const whole = Number(plot.dataset.width);
    const height = plot.viewBox.baseVal.height;
    const bars = [...plot.querySelectorAll(".range:not(.constant)")];
    const view = { start: 0, width: whole };
    let current = -1;

    const visible = (index) => !constants || constants.checked || !rows[index][CONSTANT];

    const draw = () => {
      plot.setAttribute("viewBox", `${view.start} -8 ${view.width} ${height}`);
      strip.setAttribute("viewBox", `${view.start} 0 ${view.width} 18`);
      errors?.setAttribute("viewBox", `${view.start} -8 ${view.width} 112`);
      for (const button of figure.querySelectorAll("[data-zoom]")) button.hidden = button.dataset.zoom === "0.5" ? view.width <= 12 : view.width >= whole;
      const stroke = Math.min(14, Math.max(0.8, 800 / view.width));
      for (const bar of bars) bar.setAttribute("stroke-width", stroke);
    };
    const zoom = (factor, centre) => {
      const width = factor ? Math.min(whole, Math.max(12, view.width * factor)) : whole;
      const share = (centre - view.start) / view.width;
      view.start = Math.max(0, Math.min(whole - width, centre - share * width));
      view.width = width;
      draw();
    };
    const reveal = (place) => {
      if (place < view.start || place >= view.start + view.width) {
        view.start = Math.max(0, Math.min(whole - view.width, place - view.width / 2));
        draw();
      }
    };
    const hide = () => { tip.hidden = true; cursor.setAttribute("d", ""); };
    const select = (index) => {
      if (index < 0 || index >= rows.length) return;
      current = index;
      const row = rows[index];
      const place = row[PLACE] + (row[CONSTANT] ? 0.4 : 0.5);
      reveal(place);
      cursor.setAttribute("d", `M${place} -8V${height}`);
      tip.replaceChildren(make("b", row[TENSOR]));
      const role = row[CONSTANT] ? "constant of" : "of";
      tip.append(make("div", `${role} ${row[NODE]} (${texts[row[OP]]})`), make("div", row[RANGE]), make("div", texts[row[KIND]]));
      if (texts[row[ERRORS]]) tip.append(make("div", `Error: ${texts[row[ERRORS]]}`));
      if (texts[row[WHY]]) tip.append(make("div", texts[row[WHY]], "why"));
      if (texts[row[GRAPH]]) tip.append(make("div", "Click or Enter: its graph"));
      tip.hidden = false;
      const box = field.getBoundingClientRect();
      const x = (place - view.start) / view.width * box.width;
      const left = x + 14 + tip.offsetWidth > box.width ? x - 14 - tip.offsetWidth : x + 14;
      const top = Math.min(Math.max(4, row[Y] - tip.offsetHeight / 2), box.height - tip.offsetHeight - 4);
      tip.style.transform = `translate(${Math.max(-60, left)}px, ${Math.max(0, top)}px)`;
      field.setAttribute("aria-valuenow", index + 1);
      field.setAttribute("aria-valuetext", `${row[TENSOR]}, ${texts[row[OP]]}, ${row[RANGE]}, ${texts[row[KIND]]}. ${texts[row[ERRORS]]} ${texts[row[WHY]]}`);
    };
    const step = (from, by, wanted) => {
      let index = from;
      do { index += by; } while (index >= 0 && index < rows.length && !wanted(index));
      select(index);
    };
    const hazards = rows.flatMap((row, index) => texts[row[WHY]] ? [index] : []);
    const hazard = (by) => hazards.length && select(by > 0
      ? hazards.find((index) => index > current) ?? hazards[0]
      : hazards.findLast((index) => index < current) ?? hazards.at(-1));
    const open = () => {
      const graph = current >= 0 && document.getElementById(texts[rows[current][GRAPH]]);
      if (graph) { location.hash = graph.id; graph.focus(); }
    };
    const nearest = (event) => {
      const box = field.getBoundingClientRect();
      const place = view.start + (event.clientX - box.left) / box.width * view.width;
      const y = event.clientY - box.top - 8;
      const reach = Math.max(1, 6 / box.width * view.width);
      let best = -1, least = Infinity;
      rows.forEach((row, index) => {
        const away = Math.abs(row[PLACE] + 0.5 - place);
        const cost = away / reach * 20 + Math.abs(row[Y] - y);
        if (away <= Math.max(reach, 0.5) && cost < least && visible(index)) { best = index; least = cost; }
      });
      return best;
    };

    field.addEventListener("pointermove", (event) => select(nearest(event)));
    field.addEventListener("pointerleave", () => { if (document.activeElement !== field) hide(); });
    field.addEventListener("click", open);
    field.addEventListener("focus", () => { if (field.matches(":focus-visible")) current < 0 ? step(-1, 1, visible) : select(current); });
    field.addEventListener("blur", hide);
    field.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = field.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, view.start + (event.clientX - box.left) / box.width * view.width);
    }, { passive: false });
    const middle = () => current < 0 ? view.start + view.width / 2 : rows[current][PLACE];
    const tenth = Math.max(1, Math.round(rows.length / 10));
    const keys = {
      ArrowRight: () => step(current, 1, visible),
      ArrowUp: () => step(current, 1, visible),
      ArrowLeft: () => step(current, -1, visible),
      ArrowDown: () => step(current, -1, visible),
      PageUp: () => select(Math.min(rows.length - 1, Math.max(0, current) + tenth)),
      PageDown: () => select(Math.max(0, current - tenth)),
      Home: () => step(-1, 1, visible),
      End: () => step(rows.length, -1, visible),
      h: () => hazard(1),
      H: () => hazard(-1),
      "+": () => zoom(0.5, middle()),
      "-": () => zoom(2, middle()),
      Enter: open,
      Escape: hide,
    };
    field.addEventListener("keydown", (event) => {
      const act = event.ctrlKey || event.altKey || event.metaKey ? undefined : keys[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    for (const button of figure.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(Number(button.dataset.zoom), middle()));
    for (const button of figure.querySelectorAll("[data-hazard]")) button.addEventListener("click", () => hazard(Number(button.dataset.hazard)));
    constants?.addEventListener("change", () => figure.classList.toggle("no-constants", !constants.checked));
  }
})();
