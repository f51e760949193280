// A browser starts no worker from a file on disk, and the site's search is one. There, its script runs in a hidden
// frame instead, which answers as a worker does. (The theme's own stand-in for this comes from another host.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "Search";
      // Firefox puts another document in place of an empty frame's first one, and tells of it with the load event;
      // Chromium tells of it at once, while the frame is appended.
      frame.addEventListener("load", () => this.start(frame.contentWindow, url), { once: true });
      document.body.append(frame);
    }

    start(inner, url) {
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      script.src = new URL(url, location);
      script.onload = () => {
        const waiting = this.waiting;
        this.inner = inner;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      inner.document.body.append(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inner.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
