
"use strict";
const grid = JSON.parse(document.getElementById("grid").textContent);
const names = ["batch", "noise", "steps"];
const sliders = names.map(name => document.getElementById(name));
const number = value => value >= 1e12 ? value.toExponential(2) : value.toLocaleString("en-US", {maximumFractionDigits: 2});

function show() {
  const at = sliders.map(slider => Number(slider.value));
  const [batch, noise, steps] = names.map((name, i) => grid[name][at[i]]);
  const epsilon = grid.epsilon[at[0]][at[1]][at[2]];
  const put = (id, text) => { document.getElementById(id).textContent = text; };
  put("at-batch", number(batch));
  put("at-noise", String(noise));
  put("at-steps", number(steps));
  put("epsilon", epsilon === null ? "infinite" : (Math.ceil(epsilon * 100 - 1e-9) / 100).toFixed(2));
  put("epochs", (steps * batch / grid.records).toPrecision(3).replace(/e\+?/, "e"));
  put("gradients", number(steps * batch));
  put("ratio", (noise / batch).toExponential(2));
  if (grid.parameters) put("rho", (Math.sqrt(5 * grid.parameters) * noise / batch / Math.sqrt(steps)).toPrecision(2));
  put("command", `${grid.command} --noise-multiplier ${noise} --expected-batch-size ${batch} --steps ${steps}`);
  names.forEach((name, i) => sliders[i].setAttribute("aria-valuetext", String(grid[name][at[i]])));
}

const asked = /^#(\d+)-(\d+)-(\d+)$/.exec(location.hash);
sliders.forEach((slider, i) => {
  slider.value = asked ? asked[i + 1] : grid.start[i];
  slider.addEventListener("input", () => {
    history.replaceState(null, "", "#" + sliders.map(s => s.value).join("-"));
    show();
  });
});
show();
