// The theme gives its search dialog no name that a screen reader could say.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
// A picture that scrolls on a telephone (extra.css) can be scrolled by the arrow keys, too.
for (const picture of document.querySelectorAll(".md-typeset p:has(> img)")) picture.tabIndex = 0;
