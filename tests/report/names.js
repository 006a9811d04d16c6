// Accessibility rules that break most often (WCAG 2.2: 1.1.1, 1.3.1, 4.1.2). Returns what breaks them.
() => {
  const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim();
  const found = [];
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) found.push("an id twice");
  for (const e of document.querySelectorAll("a, button")) if (!named(e)) found.push("no name: " + e.outerHTML);
  for (const e of document.querySelectorAll("img")) if (!e.alt) found.push("no alt: " + e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll("input, select")) if (!e.labels.length) found.push("no label: " + e.outerHTML);
  for (const e of document.querySelectorAll("svg:not([aria-hidden])")) if (!e.getAttribute("aria-label")) found.push("svg without a name: " + e.outerHTML.slice(0, 80));
  for (const e of document.querySelectorAll("[aria-controls], [aria-labelledby], [aria-describedby]"))
    for (const a of ["aria-controls", "aria-labelledby", "aria-describedby"])
      for (const id of (e.getAttribute(a) || "").split(" ")) if (id && !document.getElementById(id)) found.push(a + " to nowhere: " + id);
  const levels = [...document.querySelectorAll("h1, h2, h3")].map((h) => Number(h.tagName[1]));
  levels.forEach((level, i) => { if (i && level > levels[i - 1] + 1) found.push("heading skips a level"); });
  if (document.querySelectorAll("h1").length !== 1 || !document.documentElement.lang) found.push("no h1 or lang");
  for (const e of document.querySelectorAll("table")) if (!e.caption || e.querySelector("th:not([scope])")) found.push("table without caption or scope");
  return found;
}
