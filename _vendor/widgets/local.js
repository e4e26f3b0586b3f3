// The theme's Font Awesome would replace the <i> icons that the Play control changes.
window.FontAwesomeConfig = { autoReplaceSvg: "nest" };
// ipywidgets typesets through MathJax 2, the book has MathJax 3: pass its requests on.
addEventListener("load", () => {
  if (window.MathJax && !MathJax.Hub)
    MathJax.Hub = { Queue: (...jobs) => jobs.forEach((job) => MathJax.typesetPromise?.([job[2]])), Config() {} };
});
// Name the sliders for assistive technology: ipywidgets gives them a label beside them, but no name.
new MutationObserver(() => {
  for (const handle of document.querySelectorAll(".widget-slider [role=slider]:not([aria-label]), .widget-slider .noUi-handle:not([aria-label])"))
    handle.setAttribute("aria-label", handle.closest(".widget-slider").querySelector(".widget-label")?.textContent.trim() || "slider");
  // A slider over labels would read out the number of the label: let it read out the label.
  for (const slider of document.querySelectorAll(".widget-slider")) {
    const handle = slider.querySelector("[role=slider]"), label = slider.querySelector(".widget-readout")?.textContent.trim();
    if (handle && label && handle.getAttribute("aria-valuetext") !== label) handle.setAttribute("aria-valuetext", label);
  }
}).observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-valuetext"] });
