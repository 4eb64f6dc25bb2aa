// Browsers start no worker for a page that was opened from a file, so search would be
// silent there. A hidden frame runs the worker's script instead.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise(resolve => {
        const script = inner.document.createElement("script")
        script.src = url
        script.onload = () => resolve(inner)
        inner.document.body.append(script)
      })
    }

    async postMessage(data) {
      const inner = await this.loaded
      inner.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
