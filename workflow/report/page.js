// Draws the figures of #figure-data, painted from the style sheet's variables; repaints for dark mode and print.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const plots = [...document.querySelectorAll("[data-figure]")];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(hover: none), (pointer: coarse)").matches;
  const PRINT_WIDTH = 680; // pixels between the margins of a portrait A4 or letter page

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
      });
    });

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
