// The live page: polls for the newest panel, and requests the charts of the rounds in view.
(() => {
  const at = (id) => document.getElementById(id);
  const LEAST = 4; // the fewest rounds in a view
  const EVERY = 500; // milliseconds between two polls of the panel
  const SILENCE = 20000; // milliseconds without an answer: the connection is dead
  const WORDS = {
    waiting: "Waiting for the first round", reading: "Reading", running: "Running", finished: "Finished",
    stale: "Silent", damaged: "Record damaged", gone: "Run directory gone", lost: "Connection lost",
  };
  const address = (path, fields = {}) => {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(fields)) query.set(name, value);
    return `${path}${query.size ? `?${query}` : ""}`;
  };

  // The rounds in view: {} for the whole run, {newest: n} to follow the last n rounds, or {from, to}.
  let view = {}, whole = null, shown = null, panel = null, lost = false;

  // ---- the panel
  const say = () => {
    const state = lost ? "lost" : panel ? panel.state : "waiting";
    const pill = at("state");
    pill.className = `pill ${state}`;
    pill.lastChild.textContent = WORDS[state];
    const text = lost ? "The connection to the server is lost; this page reconnects by itself."
      : panel && !["running", "finished"].includes(state) ? panel.says : "";
    const notice = at("notice");
    if (notice.textContent !== text) notice.textContent = text;
    notice.hidden = !text;
    notice.className = `notice ${state}`;
  };
  // Grey boxes stand for what is not loaded yet: the first panel, a long record, the first charts.
  const loaded = () => {
    at("loading").hidden = Boolean(panel) && panel.state !== "reading" && (!panel.rounds || drawn.length > 0);
    at("loading").classList.toggle("below", Boolean(panel?.rounds));
  };
  const list = (parent, texts) => parent.replaceChildren(...texts.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
  const row = () => {
    const item = document.createElement("li");
    item.innerHTML = '<b></b><span class="load"></span><span class="bar" aria-hidden="true"><i class="sum"></i></span>'
      + '<span class="bar" aria-hidden="true"><i class="over"></i><i class="busy"></i><i class="idle"></i></span><small></small>';
    return item;
  };
  const bars = (workers) => {
    const parent = at("workers");
    while (parent.children.length > workers.length) parent.lastChild.remove();
    while (parent.children.length < workers.length) parent.append(row());
    workers.forEach((worker, i) => {
      const item = parent.children[i], parts = item.querySelectorAll("i");
      item.classList.toggle("last", worker.last);
      item.classList.toggle("gone", worker.gone);
      item.querySelector("b").textContent = `${worker.name}${worker.mark ? ` ${worker.mark}` : ""}`;
      item.querySelector(".load").textContent = worker.load;
      item.querySelector("small").textContent = worker.time;
      parts[0].className = worker.colour;
      worker.widths.forEach((width, k) => { parts[k].style.width = `${100 * width}%`; });
    });
    parent.classList.toggle("many", workers.length > 16);
    at("team").hidden = !workers.length;
  };
  const others = async () => {
    const answer = await fetch(address("others")).catch(() => null);
    const runs = answer?.ok ? await answer.json() : [];
    at("others").hidden = runs.length < 2;
    at("others").replaceChildren(...runs.map(({ name, href, current }) => {
      const link = document.createElement("a");
      link.textContent = name;
      link.href = address(href);
      if (current) link.setAttribute("aria-current", "page");
      return link;
    }));
  };
  const show = (content) => {
    if (!panel || panel.state !== content.state || panel.title !== content.title) others();
    const news = !panel || panel.rounds !== content.rounds || String(panel.span) !== String(content.span);
    panel = content;
    document.querySelector("h1").textContent = content.title;
    document.title = content.rounds ? `${content.rounds.toLocaleString("en")} · ${content.title} · Paceline` : `${content.title} · Paceline`;
    document.querySelector(".about").textContent = content.about;
    at("cards").innerHTML = content.cards;
    list(at("sentences"), content.sentences);
    bars(content.workers);
    at("findings").innerHTML = content.findings ? `<h2>The whole run in words</h2>${content.findings}` : "";
    at("rounds").hidden = !content.rounds;
    say();
    loaded();
    if (news && content.rounds) refresh(!shown);
  };

  // ---- the connection
  let seen = "";
  const look_again = async () => {
    try {
      const headers = seen ? { "If-None-Match": seen } : {};
      const answer = await fetch(address("panel"), { headers, signal: AbortSignal.timeout(SILENCE) });
      if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
      if (lost) { lost = false; say(); refresh(false); }
      if (answer.ok) {
        seen = answer.headers.get("ETag");
        show(await answer.json());
      }
    } catch {
      lost = true;
      say();
    }
    setTimeout(look_again, lost ? 4 * EVERY : EVERY);
  };

  // ---- the charts
  let asking = null, timer = 0, due = 0, again = false, dragging = false;
  const refresh = (now) => {
    if (now) {
      clearTimeout(timer);
      asking?.abort();
      ask();
    } else if (document.hidden || timer || asking) again = true;
    else timer = setTimeout(ask, Math.max(0, due - performance.now()));
  };
  const ask = async () => {
    timer = 0;
    const mine = asking = new AbortController(), began = performance.now();
    try {
      const answer = await fetch(address("figures", view), { signal: mine.signal });
      if (answer.ok) {
        const figures = await answer.json();
        if (asking === mine && !dragging && figures.rounds) draw(figures);
      }
    } catch { /* aborted, or the connection is lost, which the panel's request finds, too */ } finally {
      if (asking === mine) {
        asking = null;
        const end = performance.now();
        due = end + Math.max(1000, 3 * (end - began)); // no more requests than a slow server can answer
        if (again) { again = false; refresh(false); }
      }
    }
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(false); });
  let drawn = [], strip = "";
  const made = (html) => {
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content.firstChild;
  };
  // Charts out of sight are drawn only when they come near, to save the browser's time.
  const pending = new Map(), NEAR = 300;
  const swap = (old, html) => {
    const figure = made(html), table = figure.querySelector("details");
    if (table && old.querySelector("details")?.open) table.open = true;
    const focused = old.contains(document.activeElement);
    pending.delete(old);
    nearby.unobserve(old);
    old.replaceWith(figure);
    nearby.observe(figure);
    if (focused) figure.querySelector("summary")?.focus({ preventScroll: true });
  };
  const nearby = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && pending.has(entry.target)) swap(entry.target, pending.get(entry.target));
  }, { rootMargin: `${NEAR}px` });
  addEventListener("beforeprint", () => { for (const [old, html] of [...pending]) swap(old, html); });
  const rest = (time) => { // one at a time, in the order of the page
    const [next] = pending;
    if (next?.[0].isConnected) swap(...next);
    if (pending.size) (globalThis.requestIdleCallback ?? ((each) => setTimeout(each, 500)))(rest);
  };
  const draw = (figures) => {
    whole = figures.whole;
    shown = figures.span;
    if (figures.overview !== strip) at("strip").innerHTML = strip = figures.overview;
    if (at("says").textContent !== figures.says) at("says").textContent = figures.says;
    const charts = at("charts");
    if (drawn.length !== figures.charts.length) {
      pending.clear();
      charts.replaceChildren(...figures.charts.map(made));
      for (const figure of charts.children) nearby.observe(figure);
    } else figures.charts.forEach((html, i) => {
      if (drawn[i] === html) return;
      const old = charts.children[i], box = old.getBoundingClientRect();
      if (box.bottom > -NEAR && box.top < innerHeight + NEAR) swap(old, html);
      else pending.set(old, html);
    });
    if (pending.size) (globalThis.requestIdleCallback ?? ((each) => setTimeout(each, 500)))(rest);
    drawn = figures.charts;
    loaded();
    brush(shown);
  };
  const brush = ([from, to]) => {
    const length = whole[1] - whole[0], all = from <= whole[0] && to >= whole[1], style = at("brush").style;
    style.left = `${100 * (from - whole[0]) / length}%`;
    style.width = `${Math.max(0.4, 100 * (to - from) / length)}%`;
    at("brush").classList.toggle("all", all);
    for (const [name, off] of Object.entries({ earlier: from <= whole[0], later: to >= whole[1], in: to - from <= LEAST, out: all, whole: all }))
      document.querySelector(`[data-do="${name}"]`).setAttribute("aria-disabled", off);
  };

  // ---- zooming
  const look = (from, to) => {
    if (!whole) return;
    const length = Math.min(Math.max(Math.round(to - from), LEAST), whole[1] - whole[0]);
    from = Math.min(Math.max(Math.round(from), whole[0]), whole[1] - length);
    to = from + length;
    view = length >= whole[1] - whole[0] ? {} : to >= whole[1] ? { newest: length } : { from, to };
    history.replaceState(null, "", location.pathname + location.search + (view.newest ? `#newest-${length}` : view.to ? `#${from}-${to}` : ""));
    shown = [from, to];
    brush(shown);
    refresh(true);
  };
  const move = (portion) => {
    const by = Math.sign(portion) * Math.max(1, Math.abs(portion) * (shown[1] - shown[0]));
    look(shown[0] + by, shown[1] + by);
  };
  const scale = (factor, centre = (shown[0] + shown[1]) / 2) =>
    look(centre - (centre - shown[0]) * factor, centre + (shown[1] - centre) * factor);
  const actions = {
    earlier: () => move(-0.5), later: () => move(0.5), in: () => scale(0.5), out: () => scale(2),
    newest: () => look(whole[1] - 100, whole[1]), whole: () => look(...whole),
    first: () => look(whole[0], whole[0] + shown[1] - shown[0]), last: () => look(whole[1] - (shown[1] - shown[0]), whole[1]),
  };
  const keys = {
    ArrowLeft: "earlier", ArrowRight: "later", "+": "in", "=": "in", ArrowUp: "in", "-": "out", ArrowDown: "out",
    0: "whole", Escape: "whole", Home: "first", End: "last",
  };
  document.querySelector(".tools").addEventListener("click", (event) => {
    const button = event.target.closest("[data-do]");
    if (button && shown && button.getAttribute("aria-disabled") !== "true") actions[button.dataset.do]();
  });
  document.querySelector(".navigator").addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
    if (!action || !shown) return;
    event.preventDefault();
    actions[action]();
  });
  // The strip, or the chart with an axis of rounds, under the pointer; and the round at a place of it.
  const field = (event) => event.target.closest?.("#overview, .plot[data-axis=rounds] .field");
  const span = (element) => (element.id === "overview" ? whole : shown);
  const round = (element, x) => {
    const box = element.getBoundingClientRect(), [from, to] = span(element);
    return from + Math.min(Math.max((x - box.left) / box.width, 0), 1) * (to - from);
  };
  at("rounds").addEventListener("wheel", (event) => {
    const element = field(event);
    if (!shown || !element || (element.id !== "overview" && !event.ctrlKey)) return;
    event.preventDefault();
    scale(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max(round(element, event.clientX), shown[0]), shown[1]));
  }, { passive: false });
  at("rounds").addEventListener("dblclick", (event) => { if (shown && field(event)) look(...whole); });
  at("rounds").addEventListener("pointerdown", (event) => {
    const element = field(event);
    if (!shown || !element || event.button || (event.pointerType === "touch" && element.id !== "overview")) return;
    const start = round(element, event.clientX), before = [...shown], strip = element.id === "overview";
    const pan = strip && (before[0] > whole[0] || before[1] < whole[1]) && start > before[0] && start < before[1];
    const mark = strip ? at("brush") : element.appendChild(document.createElement("div"));
    if (!strip) mark.className = "mark";
    let now = start, moved = false;
    dragging = true;
    const drag = (next) => {
      now = round(element, next.clientX);
      moved ||= Math.abs(next.clientX - event.clientX) > 4;
      if (!moved) return;
      const [from, to] = span(element), low = Math.min(start, now), high = Math.max(start, now);
      if (pan) brush([before[0] + now - start, before[1] + now - start]);
      else if (strip) brush([low, high]);
      else {
        mark.style.left = `${100 * (low - from) / (to - from)}%`;
        mark.style.width = `${100 * (high - low) / (to - from)}%`;
      }
    };
    const end = (last) => {
      removeEventListener("pointermove", drag);
      removeEventListener("pointerup", end);
      removeEventListener("pointercancel", end);
      dragging = false;
      if (!strip) mark.remove();
      if (moved && last.type === "pointerup") {
        if (pan) look(before[0] + now - start, before[1] + now - start);
        else look(Math.round(Math.min(start, now)), Math.round(Math.max(start, now)));
      } else brush(shown);
    };
    addEventListener("pointermove", drag);
    addEventListener("pointerup", end);
    addEventListener("pointercancel", end);
  });

  const hash = location.hash.match(/^#(?:newest-(\d+)|(\d+)-(\d+))$/);
  if (hash) view = hash[1] ? { newest: +hash[1] } : { from: +hash[2], to: +hash[3] };
  look_again();
})();
