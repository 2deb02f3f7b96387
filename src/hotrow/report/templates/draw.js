// Colours are the page's own, also when a reader changes from light to dark.
(() => {
  const style = getComputedStyle(document.documentElement);
  const boxes = [...document.querySelectorAll(".chart")];
  const themed = (layout) => {
    const [ink, line, paper] = ["--ink", "--line", "--paper"].map((x) => style.getPropertyValue(x));
    const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true};
    return {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: "system-ui, sans-serif", size: 13, color: ink},
      hoverlabel: {bgcolor: paper, bordercolor: line, font: {color: ink}},
      hovermode: layout.yaxis.type === "category" ? "closest" : "x unified",
      margin: {l: 8, r: 16, t: 8, b: 8},
      xaxis: {...layout.xaxis, ...axis}, yaxis: {...layout.yaxis, ...axis}};
  };
  const draw = (how) => boxes.forEach((box) => {
    const {data, layout} = JSON.parse(box.nextElementSibling.textContent);
    const ink = style.getPropertyValue("--ink");
    data.filter((each) => each.error_x).forEach((each) => each.error_x.color = ink);
    Plotly[how](box, data, themed(layout), {responsive: true, displaylogo: false,
      displayModeBar: false});
  });
  draw("newPlot");
  document.querySelectorAll("figure button").forEach((button) => button.onclick = () => {
    const shown = button.ariaPressed === "false";
    button.ariaPressed = String(shown);
    const box = button.closest("figure").querySelector(".chart");
    const mine = box.data.flatMap((each, i) => each.legendgroup === button.textContent ? [i] : []);
    Plotly.restyle(box, {visible: shown}, mine);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw("react"));
})();
