// Browsers start no Worker on pages that are read from disk. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => done((data) => inside.dispatchEvent(new MessageEvent("message", { data })));
        inside.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then((hand) => hand(data));
    }
  };
}
