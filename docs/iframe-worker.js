"use strict";

// The site's search where its pages are opened as files. It runs in a worker, and browsers start none
// for a page that has no server, so here a worker's script runs in a hidden frame. mkdocs-material's
// plugin "offline" would load a script for this from the network; it takes this one for its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages from before the script has run; null once it has
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // What the script calls: its messages are events of this object.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(url).then(() => {
        const messages = this.waiting;
        this.waiting = null;
        messages.forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }

    load(url) {
      const script = this.frame.contentDocument.createElement("script");
      script.src = url;
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${url} cannot be loaded`));
        this.frame.contentDocument.body.append(script);
      });
    }
  };
}
