// Draws the figures of #figure-data, painted from the style sheet's variables; repaints for dark mode and print.
// Sorts tables by their headings.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const plots = [...document.querySelectorAll("[data-figure]")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(hover: none), (pointer: coarse)").matches;
  const PRINT_WIDTH = 660; // pixels between the margins of a portrait A4 or letter page

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  const paintTrace = (trace) => {
    const painted = { ...trace, marker: { ...trace.marker }, line: { ...trace.line } };
    const own = color(trace.meta);
    painted.marker.color = own;
    if (trace.type === "bar") {
      delete painted.line;
      painted.marker.line = { width: 1, color: color("raised") };
    } else {
      painted.line.color = own;
      if (trace.marker?.line) painted.marker.line = { ...trace.marker.line, color: own };
    }
    return painted;
  };

  const paintAxis = (axis) => ({
    ...axis,
    gridcolor: color("line"),
    linecolor: color("line"),
    zerolinecolor: color("line"),
    tickfont: { color: color("muted") },
    title: { ...axis.title, font: { size: 13 }, standoff: 8 },
  });

  const paintLayout = (layout) => ({
    ...layout,
    autosize: true,
    dragmode: touch ? false : "zoom", // a finger on a figure scrolls the page
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: color("ink") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("muted"), activecolor: color("accent") },
    hoverlabel: { bgcolor: color("raised"), bordercolor: color("line"), font: { color: color("ink") } },
    xaxis: paintAxis(layout.xaxis),
    yaxis: paintAxis(layout.yaxis),
  });

  const draw = (extra) =>
    plots.map((element) => {
      const { data, layout } = figures[element.dataset.figure];
      return Plotly.react(element, data.map(paintTrace), { ...paintLayout(layout), ...extra }, {
        responsive: true,
        displaylogo: false,
        displayModeBar: touch ? false : "hover",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // no button that uploads
      }).then(() => {
        // Ticks read aloud one by one say nothing; the caption names the table with the numbers.
        for (const drawing of element.querySelectorAll(".main-svg")) drawing.setAttribute("aria-hidden", "true");
      });
    });

  // A cell's number is in its first <data value>; words sort as words, after the numbers.
  const key = (row, column) => {
    const cell = row.cells[column];
    const number = cell.querySelector("data")?.getAttribute("value");
    return number === undefined ? cell.textContent.trim() : Number(number);
  };
  const compare = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  };
  const sortBy = (table, heading) => {
    const down = heading.getAttribute("aria-sort") === "ascending";
    const body = table.tBodies[0];
    const rows = [...body.rows].sort(
      (a, b) => compare(key(a, heading.cellIndex), key(b, heading.cellIndex)) * (down ? -1 : 1),
    );
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("[data-sortable]")) {
    for (const heading of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sortBy(table, heading));
      heading.append(button);
    }
  }

  // A link to something inside a closed <details> opens it.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    target.querySelector("details")?.setAttribute("open", "");
  };
  window.addEventListener("hashchange", reveal);
  reveal();

  const root = document.documentElement;
  dark.addEventListener("change", () => draw({}));
  window.addEventListener("beforeprint", () => {
    root.classList.add("printing");
    draw({ width: PRINT_WIDTH });
  });
  window.addEventListener("afterprint", () => {
    root.classList.remove("printing");
    draw({});
  });
  draw({});
})();
