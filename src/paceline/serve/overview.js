// The overview of all jobs: requests itself every two seconds, and replaces what has changed.
(() => {
  const EVERY = 2000; // milliseconds between two requests
  const lost = document.getElementById("lost");
  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { signal: AbortSignal.timeout(10 * EVERY) });
        if (!answer.ok) throw new Error(answer.statusText);
        const news = new DOMParser().parseFromString(await answer.text(), "text/html");
        document.title = news.title;
        for (const name of ["h1", "#jobs"]) {
          const [now, next] = [document, news].map((where) => where.querySelector(name));
          if (now.innerHTML === next.innerHTML) continue;
          const focused = document.activeElement?.getAttribute("href");
          now.innerHTML = next.innerHTML;
          if (focused) [...now.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
        }
        lost.hidden = true;
      } catch {
        lost.hidden = false;
      }
    }
    setTimeout(look, EVERY);
  };
  setTimeout(look, EVERY);
})();
