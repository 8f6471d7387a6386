"use strict";

// Charts, which uPlot draws, and a line that says when figures are old. Everything else works without this file.
(() => {
  const drawn = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const clock = (moment) => new Date(moment * 1e3).toISOString().slice(11, 19);

  function draw(holder) {
    drawn.get(holder)?.destroy();
    const told = JSON.parse(holder.dataset.chart);
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule") } };
    const options = {
      width: Math.max(holder.clientWidth, 200),
      height: 240,
      scales: { x: { min: told.span[0], max: told.span[1] }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } },
      tzDate: (moment) => uPlot.tzDate(new Date(moment * 1e3), "Etc/UTC"),
      axes: [{ ...axis, values: (_, moments) => moments.map((moment) => clock(moment).slice(0, 5)) }, { ...axis, size: 60 }],
      series: [
        { label: "UTC", value: (_, moment) => (moment === null ? "" : clock(moment)) },
        ...told.models.map((model, i) => ({
          label: model,
          stroke: colour(`--line${i % 6}`),
          width: 2,
          dash: i < 6 ? undefined : [6, 4],
        })),
      ],
    };
    drawn.set(holder, new uPlot(options, [told.moments, ...told.values], holder));
  }

  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const chart = drawn.get(target);
      if (chart && target.clientWidth > 0 && chart.width !== target.clientWidth) {
        chart.setSize({ width: target.clientWidth, height: 240 });
      }
    }
  });

  function found(root) {
    for (const holder of root.querySelectorAll("[data-chart]")) {
      if (!drawn.has(holder)) {
        draw(holder);
        resized.observe(holder);
      }
    }
  }

  let since = Date.now() / 1e3;
  const stale = () => document.getElementById("stale");
  function old(why) {
    stale().textContent = `${why}; the figures are of ${clock(since)} UTC.`;
    stale().hidden = false;
  }

  document.addEventListener("htmx:load", (event) => found(event.detail.elt));
  function failed(event) {
    const { elt, xhr } = event.detail;
    const told = new DOMParser().parseFromString(xhr.responseText, "text/html").querySelector("[role=alert]");
    if (elt.getAttribute("hx-trigger") !== "load") {
      old(told ? `The planner refuses: ${told.textContent}` : "The planner does not answer");
      return;
    }
    const said = document.createElement("p");
    said.className = "problem";
    said.textContent = told?.textContent ?? "The planner does not answer.";
    elt.replaceChildren(said);
  }

  document.addEventListener("htmx:sendError", failed);
  document.addEventListener("htmx:responseError", failed);
  document.addEventListener("htmx:afterOnLoad", (event) => {
    if (event.detail.xhr.status >= 400) {
      return; // htmx says so of an answer that is an error, too
    }
    since = Date.now() / 1e3;
    stale().hidden = true;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((_, holder) => draw(holder)));
})();
