"use strict";
(() => {
  for (const source of document.querySelectorAll("script[data-chart]")) {
    const place = document.getElementById(source.dataset.chart);
    const narrow = place.clientWidth < 560;
    const drawing = JSON.parse(source.textContent);
    if (narrow) {
      drawing.config.axis.labelLimit = Math.round(place.clientWidth * 0.44);
      drawing.config.legend.columns = 1;
    }
    const options = { renderer: "svg", actions: false, tooltip: { disableDefaultStyle: true } };
    // an element of its own, because the library gives it a role: that of the place stays "img"
    const canvas = place.appendChild(document.createElement("div"));
    canvas.style.width = "100%";
    vegaEmbed(canvas, drawing, options)
      .catch((error) => { place.textContent = "This figure could not be drawn: " + error.message; });
  }

  const table = document.getElementById("layers");
  if (!table) return;
  const body = table.tBodies[0];
  const order = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const keyOf = (row, column) => {
    const key = row.cells[column].dataset.key;
    return key === "" ? null : column < 2 ? key : Number(key);
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  heads.forEach((head, column) => {
    head.querySelector("button")?.addEventListener("click", () => {
      // numbers: the largest first; then the other way round; then as the model has them
      const directions = column < 2 ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
      const next = directions[(directions.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const rows = next === "none" ? order : [...order].sort((one, other) => {
        const a = keyOf(one, column), b = keyOf(other, column);
        // values that were not computed come last in both directions
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * compare(a, b);
      });
      body.append(...rows);
    });
  });

  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of order) {
      const text = [...row.cells].slice(0, 2).map((cell) => cell.dataset.key).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${order.length} layers`;
  });
})();
