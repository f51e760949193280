// Tooltips and the light or dark theme; without this script the page still shows everything else.
(() => {
  const root = document.documentElement;
  const keep = (theme) => { try { localStorage.setItem("paceline-theme", theme); } catch { /* pages opened as files may have no storage */ } };
  try { root.dataset.theme = localStorage.getItem("paceline-theme") ?? ""; } catch { /* the system's theme */ }
  document.querySelector(".theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    keep(root.dataset.theme = dark ? "light" : "dark");
  });
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  const row = (colour, text) => {
    const line = document.createElement("div");
    if (colour) line.appendChild(document.createElement("i")).className = colour;
    line.append(text);
    return line;
  };
  const nearest = (places, x) => places.reduce((best, place, i) =>
    place !== null && (best < 0 || Math.abs(place - x) < Math.abs(places[best] - x)) ? i : best, -1);
  const words = {
    line(data, x) {
      const rows = [];
      let at = null, title = "";
      for (const series of data.series) {
        const i = nearest(series.x, x);
        if (i < 0) continue;
        if (at === null) { at = series.x[i]; title = series.at[i]; }
        rows.push(row(series.colour, `${series.name}: ${series.text[i]}`));
      }
      return at === null ? null : { at, title, rows };
    },
    grid(data, x, y) {
      const i = data.edges.findLastIndex((edge) => edge <= x), k = Math.min(Math.floor(y / 1000 * data.names.length), data.names.length - 1);
      if (i < 0 || k < 0 || i >= data.at.length) return null;
      return { at: null, title: data.at[i], rows: [row("", `${data.names[k]}: ${data.text[i][k]}`)] };
    },
  };
  // One listener for all plots, since plots may be replaced.
  const read = new WeakMap();
  let rule = null;
  const hide = () => { tip.style.display = "none"; if (rule) rule.style.display = "none"; rule = null; };
  const show = (event) => {
    const field = event.target.closest?.(".field"), source = field?.parentElement.querySelector("script");
    if (!source) return hide();
    if (!read.has(source)) read.set(source, JSON.parse(source.textContent));
    const data = read.get(source), box = field.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * 1000, y = (event.clientY - box.top) / box.height * 1000;
    const found = words[data.kind](data, x, y);
    hide();
    if (!found) return;
    const title = document.createElement("b");
    title.append(found.title);
    tip.replaceChildren(title, ...found.rows);
    tip.style.display = "block";
    const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
    if (found.at === null) return;
    rule = field.querySelector(".rule");
    rule.style.display = "block";
    rule.style.left = `${found.at / 10}%`;
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true });
})();
