// Copies a card as a picture for a slide: light, 16 by 9 if its content allows, as PNG or SVG.
(() => {
  const WIDTH = 720, HEIGHT = 405, SCALE = 960 / WIDTH, SHARP = 2; // layout size; scale of the picture, and of a PNG
  const SPACE = document.querySelector("svg.patterns").namespaceURI;
  const made = (name, fields, ...inner) => {
    const element = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(fields)) element.setAttribute(key, typeof value === "number" ? +value.toFixed(2) : value);
    element.append(...inner);
    return element;
  };
  // Runs work on a copy of the card that is laid out in this size outside the page.
  const laidOut = (card, work) => {
    const slide = document.body.appendChild(document.createElement("div"));
    slide.className = "slide";
    const copy = slide.appendChild(card.cloneNode(true));
    for (const each of copy.querySelectorAll("details, .copy, .rule, .mark, script")) each.remove();
    copy.style.width = `${WIDTH}px`;
    const plots = copy.querySelectorAll(".plot"), room = HEIGHT - copy.offsetHeight;
    if (plots.length === 1) plots[0].style.setProperty("--height", `${Math.max(plots[0].querySelector(".field").clientHeight + room, 120)}px`);
    copy.style.minHeight = `${HEIGHT}px`;
    try { return work(copy); } finally { slide.remove(); }
  };
  // Scales a path of 1000 by 1000 units to pixels.
  const scaled = (path, x, y) => path.replace(/([MLHVhvZz])([^MLHVhvZz]*)/g, (_, command, numbers) => {
    const across = (i) => (command === "M" || command === "L" ? i % 2 === 0 : command === "H" || command === "h");
    return command + (numbers.match(/-?[\d.]+/g) ?? []).map((value, i) => +(value * (across(i) ? x : y)).toFixed(2)).join(" ");
  });
  const drawing = (svg, left, top) => {
    const box = svg.getBoundingClientRect(), x = box.width / 1000, y = box.height / 1000;
    const field = made("svg", { x: box.left - left, y: box.top - top, width: box.width, height: box.height });
    for (const path of svg.querySelectorAll("path")) {
      const style = getComputedStyle(path), waiting = path.classList.contains("idle");
      const stroke = style.stroke === "none" || waiting ? {} : { stroke: style.stroke, "stroke-width": style.strokeWidth, "stroke-linejoin": "round" };
      const dashes = style.strokeDasharray === "none" ? {} : { "stroke-dasharray": style.strokeDasharray };
      const fill = waiting ? "url(#waiting)" : style.fill;
      field.append(made("path", { d: scaled(path.getAttribute("d"), x, y), fill, opacity: style.opacity, ...stroke, ...dashes }));
    }
    return field;
  };
  // The shape of an element without text: a swatch, or a part of a bar.
  const box = (element, left, top) => {
    const style = getComputedStyle(element), at = element.getBoundingClientRect(), x = at.left - left, y = at.top - top;
    if (element.classList.contains("dashes"))
      return made("path", { d: `M${x} ${y}h${at.width}`, stroke: style.color, "stroke-width": 2, "stroke-dasharray": "5 3" });
    if (element.classList.contains("upright"))
      return made("path", { d: `M${x + 1} ${y}v${at.height}`, stroke: style.color, "stroke-width": 2, "stroke-dasharray": "2 3" });
    const fill = element.classList.contains("idle") ? "url(#waiting)" : style.backgroundColor;
    return fill === "rgba(0, 0, 0, 0)" ? null : made("rect", { x, y, width: at.width, height: at.height, fill });
  };
  // A text node as one element per line.
  const lines = (node, left, top) => {
    const style = getComputedStyle(node.parentElement), size = parseFloat(style.fontSize), range = document.createRange(), found = [];
    for (const word of node.data.matchAll(/\S+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const at = range.getBoundingClientRect(), last = found.at(-1);
      if (last && Math.abs(last.top - at.top) < 2) last.words.push(word[0]);
      else if (at.width) found.push({ top: at.top, left: at.left, middle: (at.top + at.bottom) / 2, words: [word[0]] });
    }
    return found.map((line) => made("text", {
      x: line.left - left, y: line.middle - top + 0.35 * size, fill: style.color, "font-size": size, "font-weight": style.fontWeight,
    }, line.words.join(" ")));
  };
  const picture = (card) => laidOut(card, (copy) => {
    const { left, top, height } = copy.getBoundingClientRect(), defs = made("defs", {});
    const pattern = document.getElementById("waiting").cloneNode(true), style = getComputedStyle(copy);
    pattern.querySelector(".ground").setAttribute("fill", style.getPropertyValue("--idle"));
    pattern.querySelector(".hatch").setAttribute("fill", style.getPropertyValue("--hatch"));
    defs.append(pattern);
    const whole = made("svg", {
      width: WIDTH * SCALE, height: height * SCALE, viewBox: `0 0 ${WIDTH} ${height}`, "font-family": style.fontFamily,
    }, defs, made("rect", { width: WIDTH, height, fill: style.backgroundColor }));
    const walk = (node) => {
      if (node.nodeType === Node.TEXT_NODE) whole.append(...lines(node, left, top));
      else if (node.tagName === "svg") whole.append(drawing(node, left, top));
      else {
        const own = node === copy || node.nodeType !== Node.ELEMENT_NODE ? null : box(node, left, top);
        if (own) whole.append(own);
        node.childNodes.forEach(walk);
        if (node.className === "field") {
          const at = node.getBoundingClientRect();
          whole.append(made("path", { d: `M${at.left - left} ${at.bottom - top}h${at.width}`, stroke: style.getPropertyValue("--soft") }));
        }
      }
    };
    walk(copy);
    return { text: new XMLSerializer().serializeToString(whole), width: WIDTH * SCALE, height: height * SCALE };
  });
  const png = async ({ text, width, height }) => {
    const image = new Image(), canvas = document.createElement("canvas");
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    canvas.width = width * SHARP;
    canvas.height = height * SHARP;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  };
  const save = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  // Copies to the clipboard, or saves a file if the browser does not allow that, for instance without HTTPS.
  const copied = async (kind, card) => {
    const made = picture(card), svg = new Blob([made.text], { type: "image/svg+xml" });
    const blob = kind === "png" ? await png(made) : svg;
    try {
      const types = kind === "png" ? { "image/png": blob } : { "text/plain": new Blob([made.text], { type: "text/plain" }) };
      if (kind === "svg" && ClipboardItem.supports?.("image/svg+xml")) types["image/svg+xml"] = svg;
      await navigator.clipboard.write([new ClipboardItem(types)]);
      return "Copied";
    } catch {
      save(blob, `${card.querySelector("h3").textContent.replace(/\W+/g, "-").toLowerCase()}.${kind}`);
      return "Saved";
    }
  };
  let fading; // clears the message on the last copy after a while; the next copy clears it at once
  const say = (said, text) => {
    clearTimeout(fading);
    document.querySelectorAll("figure [role=status]").forEach((each) => { each.textContent = ""; });
    said.textContent = text;
    fading = setTimeout(() => { said.textContent = ""; }, 3000);
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const said = button.parentElement.querySelector("[role=status]");
    say(said, "");
    say(said, await copied(button.dataset.copy, button.closest("figure")).catch(() => "Not copied"));
  });
  document.documentElement.classList.add("scripted");
})();
