// The theme gives its search dialog no name that a screen reader could say.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
// A picture that scrolls on a telephone (extra.css) can be scrolled by the arrow keys, too.
for (const picture of document.querySelectorAll(".md-typeset p:has(> img)")) picture.tabIndex = 0;
// Tables with long names of code, or with sentences in three and more columns, become cards on a telephone (extra.css):
// each cell has its column's head.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const long = ({ textContent }) => textContent.length > 40;
  const heads = Array.from(table.querySelectorAll("thead th"), (head) => head.textContent);
  const texts = table.querySelectorAll(heads.length > 2 ? "td + td" : "td + td code");
  if (![...texts].some(long)) continue;
  table.dataset.cards = "";
  for (const { cells } of table.tBodies[0].rows) heads.forEach((head, i) => { cells[i].dataset.head = head; });
}
